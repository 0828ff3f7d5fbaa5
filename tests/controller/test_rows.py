"""Rows are counted, taken and joined alike for batches, lists, tuples and tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.batches import sampled_batch
from verl.batch import Batch
from verl.common.errors import ShapeError
from verl.controller.rows import join_rows, num_rows, shard_bounds, take_rows


@pytest.mark.parametrize(
    "value, rows",
    [
        ([1, 2], 2),
        ((), 0),
        (torch.zeros(3, 2), 3),
        (torch.zeros(()), None),
        ("ab", None),
        ({"a": [1]}, None),
        (5, None),
    ],
)
def test_what_has_rows(value: Any, rows: int | None) -> None:
    assert num_rows(value) == rows


@pytest.mark.parametrize("value", [[1, 2, 3], (1, 2, 3), torch.tensor([1, 2, 3])])
def test_taken_and_joined_again(value: Any) -> None:
    parts = [take_rows(value, 0, 1), take_rows(value, 1, 1), take_rows(value, 1, 3)]
    assert [len(part) for part in parts] == [1, 0, 2]
    assert type(join_rows(parts)) is type(value) and list(join_rows(parts)) == list(value)


def test_rows_of_a_batch() -> None:
    batch = sampled_batch([2, 3, 1], [1, 4, 2])
    parts = [take_rows(batch, 0, 2), Batch([]), take_rows(batch, 2, 3)]
    whole = join_rows(parts)
    assert torch.equal(whole["response_ids"], batch["response_ids"]) and whole.lengths("prompt_ids").tolist() == [
        2,
        3,
        1,
    ]


def test_nothing_from_every_rank_is_nothing() -> None:
    assert join_rows([None, None]) is None


@pytest.mark.parametrize("values", [[{"loss": 1.0}], [1, 2], [None, [1]], [[1], (2,)]])
def test_what_cannot_be_joined(values: list[Any]) -> None:
    with pytest.raises(ShapeError, match="can't be joined"):
        join_rows(values)


def test_shards_differ_by_one_row_at_most() -> None:
    assert shard_bounds(7, 3) == [(0, 3), (3, 5), (5, 7)]
    assert shard_bounds(2, 3) == [(0, 1), (1, 2), (2, 2)]
    assert shard_bounds(0, 2) == [(0, 0), (0, 0)]
