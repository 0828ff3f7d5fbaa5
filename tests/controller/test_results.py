"""Cutting and joining descriptions is the same as cutting and joining what they describe."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.batches import sampled_batch
from verl.controller.executors.memory import store
from verl.controller.results import Joined, Kept, Listed, Store, shards


@pytest.mark.parametrize("put", [Kept, store])
def test_parts_of_joined_parts(put: Store) -> None:
    whole = Joined((put([0, 1, 2]), put([]), put([3, 4]), put([5])))
    assert whole.num_rows == 6
    for start in range(7):
        for stop in range(start, 7):
            part = whole.take(start, stop)
            assert part.num_rows == stop - start and part.load() == list(range(start, stop))
            assert part.take(0, part.num_rows // 2).load() == list(range(start, start + (stop - start) // 2))


def test_parts_that_do_not_overlap_are_not_loaded() -> None:
    part = Joined((Kept([0, 1]), Kept([2, 3]))).take(2, 4)
    assert len(part.parts) == 1


def test_shards() -> None:
    assert [shard.load() for shard in shards(Kept((1, 2, 3)), 2)] == [(1, 2), (3,)]


def test_a_list_of_results_has_rows_but_what_it_holds_need_not() -> None:
    listed = Listed((Kept({"loss": 1}), Kept({"loss": 2})))
    assert listed.num_rows == 2 and listed.take(1, 2).load() == [{"loss": 2}]
    assert Joined((Kept({"loss": 1}),)).num_rows is None


@pytest.mark.parametrize("put", [Kept, store])
def test_columns(put: Store) -> None:
    batch = sampled_batch([1, 1], [2, 3])
    got = Joined((put(batch.select([0])), put(batch.select([1])))).load(["row_id", "values"])
    assert got.names == ["row_id", "values"] and torch.equal(got["values"], batch["values"])
    assert put({"a": 1, "b": 2}).load(["b"]) == {"b": 2}


@pytest.mark.parametrize("value", [sampled_batch([1], [1]), [1], {"a": 1}])
def test_a_kept_container_is_not_the_callers_own(value: Any) -> None:
    assert Kept(value).load() is not value


def test_a_kept_tensor_is() -> None:
    tensor = torch.zeros(2)
    assert Kept(tensor).load() is tensor
