from __future__ import annotations

from typing import Any

import pytest

from tests.tiny import word_tokenizer
from verl.common.errors import DataError
from verl.data.demonstrations import DemonstrationDataConfig, load_demonstrations
from verl.data.examples import Example, ExampleDataset, collate

HI = {"role": "user", "content": "hi"}
TALK = [HI, {"role": "assistant", "content": "w20 w21"}, {"role": "user", "content": "w9"}]
TALK = [*TALK, {"role": "assistant", "content": "w22"}]


def load(rows: list[dict[str, Any]], **keys: Any) -> ExampleDataset:
    return load_demonstrations(rows, DemonstrationDataConfig(**keys), word_tokenizer())


def learned(example: Example) -> list[int]:
    (answer,) = example.answers
    return [token for token, flag in zip(answer.response_ids, answer.response_mask, strict=True) if flag]


def test_an_answer_and_its_end_are_learned_behind_the_prompts_ids() -> None:
    dataset = load([{"q": "hi", "a": "w20"}], prompt_key="q", response_key="a")
    assert dataset[0].prompt_ids == (1, 3, 5, 4) and learned(dataset[0]) == [20, 2]
    assert dataset.report.summary() == "read 1 rows, kept 1"


def test_of_a_conversation_every_assistant_turn_is_learned_and_nothing_else() -> None:
    dataset = load([{"prompt": TALK}], response_key=None)
    (answer,) = dataset[0].answers
    assert answer.prompt_ids + answer.response_ids == (1, 3, 5, 4, 20, 21, 2, 3, 9, 4, 22, 2)
    assert learned(dataset[0]) == [20, 21, 2, 22, 2]
    batch = collate([dataset[0]])
    assert batch["response_mask"].tolist() == [True] * 3 + [False] * 3 + [True] * 2
    assert "pair_id" not in batch


ROWS = [{"prompt": "hi", "response": "w20"}, {"prompt": "hi", "response": "w20 w21"}]
ROWS = [*ROWS, {"prompt": "w6 w7 w8 w9", "response": "w21"}]
"""Of 6, 7 and 9 tokens, the last one's answer at token 7."""


def test_longer_examples_are_dropped_and_named() -> None:
    dataset = load(ROWS, max_example_tokens=6)
    assert [learned(example) for example in dataset] == [[20, 2]]
    assert dataset.report.summary() == (
        "read 3 rows, kept 1; 2 dropped (overlong): rows[1] (7 tokens, limit 6), rows[2] (9 tokens, limit 6)"
    )


def test_longer_examples_are_an_error_on_request() -> None:
    with pytest.raises(
        DataError, match=r"2 of 3 rows.*max_example_tokens(.|\n)*rows\[1\] \(row 1\): 7 tokens, limit 6"
    ):
        load(ROWS, max_example_tokens=6, overlong_examples="error")


def test_rows_without_an_answer_are_named_before_those_that_are_too_long() -> None:
    rows = [*ROWS, {"prompt": "hi", "response": 3}]
    for rule in ("drop", "error", "right"):
        with pytest.raises(DataError) as error:
            load(rows, max_example_tokens=6, overlong_examples=rule)
        assert str(error.value) == (
            "data.train: 1 of 4 rows can't be used. Mend or remove these rows:\n"
            "  rows[3] (row 3): the answer in column 'response' must be text, got int"
        )


def test_when_every_example_is_dropped_the_error_says_why() -> None:
    with pytest.raises(DataError) as error:
        load(ROWS[1:], max_example_tokens=4, overlong_examples="right")
    assert str(error.value) == (
        "data.train: no row is left to learn from: read 2 rows, kept 0; 2 dropped (answer cut away): rows[0] (the "
        "answer begins at token 4, beyond the limit of 4), rows[1] (the answer begins at token 7, beyond the limit of "
        "4). Raise data.max_example_tokens"
    )


def test_longer_examples_are_cut_unless_no_answer_is_left() -> None:
    dataset = load(ROWS, max_example_tokens=6, overlong_examples="right")
    assert [learned(example) for example in dataset] == [[20, 2], [20, 21]]
    assert dataset.report.summary() == (
        "read 3 rows, kept 2; 1 dropped (answer cut away): rows[2] (the answer begins at token 7, beyond the limit of "
        "6); 1 cut: rows[1] (7 tokens, limit 6)"
    )


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([ROWS[0], {"prompt": "hi", "response": 3}], r"1 of 2 rows(.|\n)*rows\[1\].*must be text, got int"),
        ([{"prompt": "hi"}], r"'response' \(data\.response_key\) isn't in the row"),
        ([{"prompt": " ".join(["w6"] * 20), "response": "w20"}], r"no row is left.*max_example_tokens"),
        ([], "data set is empty"),
    ],
)
def test_rows_that_teach_nothing(rows: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(DataError, match=said):
        load(rows, max_example_tokens=8)


def test_the_fingerprint_is_that_of_what_is_learned() -> None:
    prints = {load(rows).fingerprint for rows in (ROWS, ROWS[:2], [*ROWS[1:], ROWS[0]])}
    assert len(prints) == 3 and load(ROWS).fingerprint in prints
