from __future__ import annotations

import pytest
import torch

from verl.common.errors import DataError
from verl.data.examples import Answer, Example, ExampleDataset, answer_key, answer_of, answers_batch, collate
from verl.data.gathering import LoadReport


def answer(prompt: list[int], response: list[int], mask: list[bool] | None = None) -> Answer:
    return Answer(tuple(prompt), tuple(response), tuple(mask or [True] * len(response)))


def pair(row_id: int, prompt: list[int], chosen: list[int], rejected: list[int]) -> Example:
    return Example(row_id, (answer(prompt, chosen), answer(prompt, rejected)), (True, False), "rows")


def dataset(*examples: Example) -> ExampleDataset:
    return ExampleDataset(examples, LoadReport(len(examples), len(examples), {}, ()))


def test_pairs_as_rows() -> None:
    batch = collate([pair(7, [5, 6], [8, 2], [9]), pair(3, [5], [8], [7, 7, 2])])
    assert batch["pair_id"].tolist() == [0, 0, 1, 1]
    assert batch["is_chosen"].tolist() == [True, False, True, False]
    assert batch["row_id"].tolist() == [7, 7, 3, 3]
    assert batch.padded("response_ids").tolist() == [[8, 2, 0], [9, 0, 0], [8, 0, 0], [7, 7, 2]]
    assert batch.padded("prompt_ids").tolist() == [[5, 6], [5, 6], [5, 0], [5, 0]]
    assert batch.lengths("response_ids").tolist() == [2, 1, 1, 3]
    assert [row["example"].row_id for row in batch.rows] == [7, 7, 3, 3]


def test_single_answers_have_no_pairs() -> None:
    batch = collate([Example(0, (answer([5], [8, 9, 2], [True, False, True]),), (False,), "rows")])
    assert "pair_id" not in batch and batch["is_chosen"].tolist() == [False]
    assert batch["response_mask"].tolist() == [True, False, True]


def test_no_answers_make_an_empty_batch() -> None:
    batch = answers_batch([])
    assert len(batch) == 0 and batch["prompt_ids"].dtype == torch.int64


def test_a_key_tells_prompt_from_response() -> None:
    keys = {answer_key([1, 2], [3]), answer_key([1], [2, 3]), answer_key([1, 2, 3], []), answer_key([1, 2], [4])}
    assert len(keys) == 4 and all(len(key) == 16 for key in keys)
    assert answer([1, 2], [3]).key == answer_key([1, 2], [3])


def test_the_response_begins_at_the_first_token_that_counts() -> None:
    found = answer_of([1, 5, 6, 8, 3, 9, 2], [False, False, False, True, False, True, True])
    assert found == Answer((1, 5, 6), (8, 3, 9, 2), (True, False, True, True))


def test_a_fingerprint_is_of_ids_rows_and_labels() -> None:
    one = dataset(pair(0, [5], [8], [9]))
    assert one.fingerprint == dataset(pair(0, [5], [8], [9])).fingerprint
    others = [pair(0, [5], [9], [8]), pair(1, [5], [8], [9]), pair(0, [5], [8], [7])]
    assert one.fingerprint not in {dataset(other).fingerprint for other in others}


def test_prompts_that_are_held_out_leave() -> None:
    train = dataset(pair(0, [5], [8], [9]), pair(1, [6], [8], [9]))
    left = train.without_prompts(dataset(pair(0, [5], [7], [7])))
    assert [example.row_id for example in left] == [1]
    assert "1 dropped (also in data.val)" in left.report.summary()
    with pytest.raises(DataError, match=r"data\.exclude_val"):
        train.without_prompts(train)
