from __future__ import annotations

import pytest
import torch

from tests.rollout.engines import build, greedy
from tests.tiny import tiny_model, word_tokenizer
from verl.batch import Batch, FinishReason
from verl.common.seeding import derive_seed
from verl.data.prompts import PromptRow
from verl.rollout.base import SamplingParams
from verl.workers.rollout import Rollout

ROWS = [
    PromptRow(7, "w9", (1, 9), ["a"], {"level": 3}, "s"),
    PromptRow(4, "w9 w20", (1, 9, 20), "b", {"level": 5}, "s"),
]


def sampled(temperature: float = 1.0, group: int = 3, rows: list[PromptRow] = ROWS, **places: list[int]) -> Batch:
    sampling = SamplingParams(max_new_tokens=5, temperature=temperature)
    return Rollout(build(), word_tokenizer(), sampling, group).generate(rows, 11, "train", 1, **places)


def test_a_batch_holds_what_the_engine_said() -> None:
    batch = sampled()
    assert batch["row_id"].tolist() == [7, 7, 7, 4, 4, 4] and batch["group_id"].tolist() == [0, 0, 0, 1, 1, 1]
    assert batch["prompt_ids"].tolist() == [1, 9] * 3 + [1, 9, 20] * 3
    lengths = batch.lengths("response_ids")
    assert bool(batch["response_mask"].all()) and len(batch["rollout_log_probs"]) == int(lengths.sum())
    for ids, reason in zip(batch["response_ids"].split(lengths.tolist()), batch["finish_reason"].tolist(), strict=True):
        assert reason == (FinishReason.STOP if ids[-1] == 2 else FinishReason.LENGTH)
    assert batch["policy_version"].tolist() == [0] * 6


def test_rows_carry_the_data_and_the_text() -> None:
    batch, tokenizer = sampled(), word_tokenizer()
    texts = batch["response_ids"].split(batch.lengths("response_ids").tolist())
    for i, row in enumerate(batch.rows):
        assert (row["prompt"], row["ground_truth"], row["level"]) == (("w9", ["a"], 3), ("w9 w20", "b", 5))[i // 3]
        assert row["response"] == tokenizer.decode(texts[i], skip_special_tokens=True)


def test_greedy_is_the_plain_forward() -> None:
    batch = sampled(temperature=0.0, group=1)
    ids = [x.tolist() for x in batch["response_ids"].split(batch.lengths("response_ids").tolist())]
    assert ids == [greedy(tiny_model("llama"), row.prompt_ids, 5) for row in ROWS]


def test_samples_of_a_prompt_differ_and_follow_from_their_seed() -> None:
    one, again = sampled(), sampled()
    assert torch.equal(one["response_ids"], again["response_ids"])
    pieces = [tuple(x.tolist()) for x in one["response_ids"].split(one.lengths("response_ids").tolist())]
    assert len(set(pieces[:3])) > 1
    assert len({derive_seed(11, "train", 1, place, k) for place in (0, 1) for k in (0, 1, 2)}) == 6


@pytest.mark.parametrize("rows", [ROWS, ROWS[::-1], ROWS[:1], ROWS[1:]])
def test_places_make_a_row_independent_of_its_neighbours(rows: list[PromptRow]) -> None:
    whole = sampled(places=[row.row_id for row in ROWS])
    part = sampled(rows=rows, places=[row.row_id for row in rows])

    def by_row(batch: Batch) -> dict[int, list[list[int]]]:
        found: dict[int, list[list[int]]] = {}
        for row_id, ids in zip(
            batch["row_id"].tolist(), batch["response_ids"].split(batch.lengths("response_ids").tolist()), strict=True
        ):
            found.setdefault(row_id, []).append(ids.tolist())
        return found

    expected = by_row(whole)
    assert by_row(part) == {row.row_id: expected[row.row_id] for row in rows}


def test_the_same_prompt_twice_in_a_step_is_sampled_anew() -> None:
    batch = sampled(rows=[ROWS[0], ROWS[0]])
    pieces = [tuple(x.tolist()) for x in batch["response_ids"].split(batch.lengths("response_ids").tolist())]
    assert pieces[:3] != pieces[3:] and batch["group_id"].tolist() == [0, 0, 0, 1, 1, 1]
