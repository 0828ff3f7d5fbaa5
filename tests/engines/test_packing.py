from __future__ import annotations

import torch

from tests.batches import sampled_batch
from verl.engines.packing import (
    EVEN_COST_TOKENS,
    balanced_shards,
    cut_by_tokens,
    cut_into,
    in_batch_order,
    kept_together,
    pack,
    rows_of,
    unit_lengths,
    workload,
)


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
    assert pack(batch, torch.device("cpu"), 0).predict_at.tolist() == [2, 4, 5]


def test_no_rows_pack_into_a_token_that_predicts_nothing() -> None:
    rows = pack(sampled_batch([2], [1]).select([]), torch.device("cpu"))
    assert (rows.input_ids.tolist(), rows.position_ids.tolist()) == ([0], [0])
    assert rows.predict_at.tolist() == rows.targets.tolist() == []


def test_ranks_of_unequal_lengths_make_equally_many_passes() -> None:
    """H24: budget 8; rows of 7 stand alone, so four passes, and rows of 2 are cut into as many."""
    long, short = (cut_by_tokens([n] * 4, 8) for n in (7, 2))
    assert (len(long), len(short)) == (4, 1)
    assert cut_into(long, [7] * 4, 4) == long
    assert sorted(cut_into(short, [2] * 4, 4)) == [[0], [1], [2], [3]]


def test_a_rank_with_fewer_rows_than_passes_makes_empty_ones() -> None:
    assert cut_into(cut_by_tokens([5, 3], 8), [5, 3], 4) == [[0], [1], [], []]
    assert cut_into([], [], 2) == [[], []]


def test_the_heaviest_micro_batch_is_halved_first() -> None:
    lengths = [9, 1, 8, 2]
    assert sorted(cut_into([[0, 2], [1, 3]], lengths, 3)) == [[0], [1, 3], [2]]


def test_attention_makes_a_long_row_cost_more_than_its_tokens() -> None:
    assert workload(EVEN_COST_TOKENS) == 2 * EVEN_COST_TOKENS
    assert workload(100) < 101
    long, short = 2 * EVEN_COST_TOKENS, EVEN_COST_TOKENS
    assert workload(long) == 3 * 2 * short  # so the three short rows below are less work than the long one
    assert balanced_shards([long, short, short, short, 1, 1], 2) == [[0, 4, 5], [1, 2, 3]]


def test_shards_have_equally_many_rows_and_like_work() -> None:
    lengths = [9, 1, 8, 2, 7, 3, 6]
    shards = balanced_shards(lengths, 2)
    assert sorted(row for shard in shards for row in shard) == list(range(7))
    assert sorted(map(len, shards)) == [3, 4]
    assert balanced_shards([9, 8, 7, 6], 2) == [[0, 3], [1, 2]]
    assert balanced_shards([4], 2) == [[0], []]


def test_rows_of_a_pair_stay_together_wherever_rows_are_cut() -> None:
    batch = sampled_batch([1, 1, 1, 1, 1], [6, 2, 1, 3, 4])
    assert kept_together(batch) == [[0], [1], [2], [3], [4]]
    batch.put("pair_id", torch.tensor([7, 3, 7, 3, 9]))
    units = kept_together(batch)
    assert units == [[0, 2], [1, 3], [4]]
    assert unit_lengths(batch, units) == [7 + 2, 3 + 4, 5]
    assert rows_of(units, cut_by_tokens(unit_lengths(batch, units), 8)) == [[0, 2], [1, 3], [4]]
    assert rows_of(units, [[0, 2], [1]]) == [[0, 2, 4], [1, 3]]
    assert kept_together(batch.select([])) == [] and unit_lengths(batch.select([]), []) == []


def test_numbers_come_back_in_the_order_of_the_rows() -> None:
    batch = sampled_batch([1, 1, 1], [2, 0, 3])
    values = torch.tensor([30.0, 31, 32, 10, 11])  # of rows 2, 0, 1
    assert in_batch_order(values, [2, 0, 1], batch).tolist() == [10, 11, 30, 31, 32]
    assert in_batch_order(torch.zeros(0), [], sampled_batch([], [])).shape == (0,)
