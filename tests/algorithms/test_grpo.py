import pytest
import torch

from tests.algorithms.rows import NAN, make_batch, near
from verl.algorithms.grpo import GRPO, GRPOConfig
from verl.batch import Batch
from verl.common.errors import MissingField


def by_row(batch: Batch) -> list[list[float]]:
    return [x.tolist() for x in batch["advantages"].split(batch.lengths("advantages").tolist())]


def test_by_hand_on_ragged_rows_with_tool_tokens():
    batch = make_batch([1, 3, 2, 1], [1, 0, 0, 0], groups=[4] * 4, masked=[(1, 1), (2, 1)])
    metrics = GRPO(GRPOConfig()).advantages(batch)
    near(batch["advantages"], [1.5, -0.5, 0, -0.5, -0.5, 0, -0.5], 1e-5)
    near(batch["returns"], batch["advantages"])
    near(batch["token_rewards"], [1, 0, 0, 0, 0, 0, 0])
    assert metrics["algorithm/groups"] == 1 and metrics["algorithm/groups_equal_frac"] == 0
    assert metrics["algorithm/advantages/max"] == pytest.approx(1.5, abs=1e-5)
    assert metrics["algorithm/advantages/mean"] == pytest.approx((1.5 - 0.5 * 4) / 5, abs=1e-5)


def test_without_the_standard_deviation():
    batch = make_batch([1] * 4, [1, 0, 0, 0], groups=[0] * 4)
    GRPO(GRPOConfig(normalise_by_std=False)).advantages(batch)
    near(batch["advantages"], [0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("scores", [[1.0] * 4, [0.7] * 8, [0.1] * 3, [0.35] * 16, [0.7], [-2.0]])
def test_groups_that_teach_nothing_are_exactly_zero(scores, by_std):
    n = len(scores)
    batch = make_batch([2] * n, scores, groups=[3] * n)
    metrics = GRPO(GRPOConfig(normalise_by_std=by_std)).advantages(batch)
    assert torch.equal(batch["advantages"], torch.zeros(2 * n))
    kind = "single" if n == 1 else "equal"
    assert metrics[f"algorithm/groups_{kind}_frac"] == 1


def test_failed_rows_are_in_no_group_and_no_loss():
    scored = [True, False, True, False, True, False]
    batch = make_batch(
        [2, 1, 1, 1, 1, 1], [1, NAN, 0, 0.9, 0.7, 5], groups=[0, 0, 0, 1, 2, 2], rows={"is_scored": scored}
    )
    metrics = GRPO(GRPOConfig()).advantages(batch)
    half = 0.5**0.5
    near(batch["advantages"], [half, half, 0, -half, 0, 0, 0], 1e-5)
    assert batch["response_mask"].tolist() == [True, True, False, True, False, True, False]
    assert metrics["algorithm/rows_excluded"] == 3
    assert metrics["algorithm/groups_empty_frac"] == pytest.approx(1 / 3)
    assert metrics["algorithm/groups_single_frac"] == pytest.approx(1 / 3)


def test_empty_responses_count_as_members_and_nothing_else():
    batch = make_batch([0, 2, 0, 1], [0, 1, 0, 1], groups=[0, 0, 1, 1])
    metrics = GRPO(GRPOConfig()).advantages(batch)
    half = 0.5**0.5
    near(batch["advantages"], [half, half, half], 1e-5)
    assert metrics["algorithm/rows_empty"] == 2
    nothing = make_batch([0, 0], [0, 1], groups=[0, 0])
    metrics = GRPO(GRPOConfig()).advantages(nothing)
    assert len(nothing["advantages"]) == 0 and metrics["algorithm/rows_empty"] == 2
    assert "algorithm/advantages/mean" not in metrics


def test_a_row_does_not_depend_on_other_groups_or_order():
    lengths, scores, groups = [3, 1, 2, 2, 1], [0.1, 0.7, 0.35, 0.2, 0.3], [0, 1, 0, 1, 0]
    batch = make_batch(lengths, scores, groups=groups)
    GRPO(GRPOConfig()).advantages(batch)
    order = [4, 3, 1, 0, 2]
    mixed = make_batch([lengths[i] for i in order], [scores[i] for i in order], groups=[groups[i] for i in order])
    GRPO(GRPOConfig()).advantages(mixed)
    alone = batch.select([0, 2, 4])
    GRPO(GRPOConfig()).advantages(alone)
    whole = by_row(batch)
    assert [whole[i] for i in order] == by_row(mixed)
    assert [whole[i] for i in (0, 2, 4)] == by_row(alone)


def test_twice_is_as_once():
    batch = make_batch([2, 1], [1, 0], groups=[0, 0], rows={"is_scored": [True, False]})
    first = GRPO(GRPOConfig()).advantages(batch)
    assert GRPO(GRPOConfig()).advantages(batch) == first


def test_a_batch_without_groups_is_refused():
    with pytest.raises(MissingField, match="group_id"):
        GRPO(GRPOConfig()).advantages(make_batch([1], [1], groups=[]))
