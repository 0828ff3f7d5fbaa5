from __future__ import annotations

import torch

from tests.batches import sampled_batch
from verl.engines.packing import cut_by_tokens, pack


def test_cut_keeps_every_row_once_within_the_budget() -> None:
    lengths = [7, 7, 7, 7, 2, 2, 2, 2]
    bins = cut_by_tokens(lengths, 8)
    assert sorted(i for rows in bins for i in rows) == list(range(8))
    assert all(sum(lengths[i] for i in rows) <= 8 for rows in bins)
    assert len(bins) == 5


def test_a_row_beyond_the_budget_stands_alone() -> None:
    assert sorted(cut_by_tokens([9, 1, 1], 4)) == [[0], [1, 2]]


def test_no_rows_make_no_micro_batch() -> None:
    assert cut_by_tokens([], 8) == []


def test_pack_lays_prompt_and_response_end_to_end() -> None:
    batch = sampled_batch([2, 1], [1, 2])
    batch.put("prompt_ids", torch.tensor([11, 12, 21]), [2, 1])
    batch.put("response_ids", torch.tensor([13, 22, 23]), [1, 2])
    rows = pack(batch, torch.device("cpu"))
    assert rows.input_ids.tolist() == [11, 12, 13, 21, 22, 23]
    assert rows.position_ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert rows.predict_at.tolist() == [1, 3, 4]
    assert rows.targets.tolist() == [13, 22, 23]
