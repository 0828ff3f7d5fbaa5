from __future__ import annotations

import math
import pickle
import time

import pytest
import torch

from tests.ranks import RankFailed, run_ranks
from verl.observe.metrics import MetricSums, PhaseTimer, merged_over_ranks


def test_mean_over_unequal_pieces_is_the_mean_over_elements() -> None:
    sums = MetricSums()
    sums.add_mean("actor/loss", torch.tensor(4.0), torch.tensor(4))  # losses 1 1 1 1
    sums.add_mean("actor/loss", torch.tensor(4.0), torch.tensor(1))  # loss 4
    assert sums.result() == {"actor/loss": 1.6}  # the mean of means would be 2.5


def test_suffix_decides_how_pieces_join() -> None:
    sums = MetricSums()
    sums.update({"a/max": 3.0, "a/min": torch.tensor(3), "a/sum": 3, "a/mean": (3.0, 1.0), "a": (1.0, 2.0)})
    sums.update({"a/max": torch.tensor(5.0), "a/min": 4.0, "a/sum": torch.tensor(4.0), "a/mean": (9.0, 3), "a": (2, 2)})
    assert sums.result() == {"a/max": 5.0, "a/min": 3.0, "a/sum": 7.0, "a/mean": 3.0, "a": 0.75}


@pytest.mark.parametrize("number", [float, torch.tensor], ids=["numbers", "tensors"])
def test_an_extreme_over_nothing_does_not_count(number) -> None:  # type: ignore[no-untyped-def]
    sums = MetricSums()
    for value, count in [(9.0, 0.0), (2.0, 3.0), (1.0, 1.0)]:
        pair = (number(value), number(count))
        sums.update(
            {"a/max": pair, "a/min": (number(value - 9), number(count)), "none/max": (number(5.0), number(0.0))}
        )
    assert sums.result() == {"a/max": 2.0, "a/min": -8.0}


def test_lone_scalar_for_a_mean_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'actor/loss' is a mean: give \(sum, count\)"):
        MetricSums().update({"actor/loss": 2.0})
    with pytest.raises(ValueError, match=r"shape \[2\]"):
        MetricSums().add_sum("a", torch.ones(2))


def test_one_key_keeps_one_kind() -> None:
    sums = MetricSums()
    sums.add_mean("a", 1.0, 1.0)
    with pytest.raises(ValueError, match="was a mean and is now a sum"):
        sums.add_sum("a", 1.0)


@pytest.mark.parametrize("number", [float, torch.tensor], ids=["numbers", "tensors"])
def test_nan_shows_in_every_kind(number) -> None:  # type: ignore[no-untyped-def]
    for order in [(math.nan, 1.0), (1.0, math.nan)]:
        sums = MetricSums()
        for value in order:
            sums.update(
                {"a/max": number(value), "a/min": number(value), "a/sum": number(value), "a": (number(value), 1)}
            )
        assert all(math.isnan(x) for x in sums.result().values()) and len(sums.result()) == 4


def test_mean_over_nothing_is_left_out() -> None:
    sums = MetricSums()
    sums.add_mean("a", torch.tensor(0.0), torch.tensor(0))
    sums.add_values("b", torch.ones(2), torch.zeros(2, dtype=torch.bool))
    assert sums.result() == {}


def test_values_under_a_mask() -> None:
    sums = MetricSums()
    sums.add_values("b", torch.tensor([[1, 9], [3, 2]]), torch.tensor([[True, False], [True, True]]))
    assert sums.result() == {"b/mean": 2.0, "b/max": 3.0, "b/min": 1.0}


def test_float64_sums_keep_small_addends() -> None:
    sums = MetricSums()
    sums.add_sum("tokens/sum", torch.tensor(2.0**24))
    for _ in range(3):
        sums.add_sum("tokens/sum", torch.tensor(1.0))
    assert sums.result() == {"tokens/sum": 2.0**24 + 3}


def test_holds_no_graph_and_stays_a_tensor_until_asked() -> None:
    weight = torch.ones((), requires_grad=True)
    sums = MetricSums()
    sums.add_mean("a", weight * 2, 1)
    cell = sums._cells["a"].value
    assert isinstance(cell, torch.Tensor) and not cell.requires_grad
    assert isinstance(sums.cpu()._cells["a"].value, float)
    assert pickle.loads(pickle.dumps(sums)).result() == {"a": 2.0}


def test_merge_is_the_same_in_any_split() -> None:
    pieces = [(1.0, 1.0), (8.0, 2.0), (3.0, 5.0)]
    left, right = MetricSums(), MetricSums()
    left.add_mean("a", *pieces[0])
    left.add_max("only/max", 1.0)
    for piece in pieces[1:]:
        right.add_mean("a", *piece)
    left.merge(right)
    assert left.result() == {"a": 12 / 8, "only/max": 1.0}


def _merge_two(rank: int) -> dict[str, float]:
    sums = MetricSums()
    sums.add_mean("loss", [4.0, 4.0][rank], [4.0, 1.0][rank])
    if rank == 1:
        sums.add_max("late/max", torch.tensor(7.0))
    return merged_over_ranks(sums).result()


def test_ranks_of_unequal_size_and_different_keys() -> None:
    assert run_ranks(2, _merge_two) == [{"loss": 1.6, "late/max": 7.0}] * 2


def test_without_ranks_merging_changes_nothing() -> None:
    sums = MetricSums()
    sums.add_sum("a/sum", 2)
    assert merged_over_ranks(sums).result() == {"a/sum": 2.0}


def test_run_ranks_brings_the_remote_traceback_and_ends_the_others() -> None:
    def one_raises(rank: int) -> None:
        import torch.distributed as dist

        if rank == 1:
            raise KeyError("broken on purpose")
        dist.barrier()  # rank 1 never comes

    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?s)rank 1 raised.*one_raises.*broken on purpose"):
        run_ranks(2, one_raises)
    assert time.monotonic() - start < 30


def test_phases_add_up_nest_and_survive_an_error() -> None:
    timer = PhaseTimer()
    with timer.phase("step"):
        for _ in range(2):
            with timer.phase("generate"):
                time.sleep(0.01)
    with pytest.raises(KeyError), timer.phase("reward"):
        raise KeyError
    seconds = timer.result()
    assert set(seconds) == {"timing/step_s", "timing/generate_s", "timing/reward_s"}
    assert 0.02 <= seconds["timing/generate_s"] <= seconds["timing/step_s"] < 2
    timer.reset()
    assert timer.result() == {}
