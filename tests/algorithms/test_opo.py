import pytest
import torch

from tests.algorithms.rows import NAN, columns_of, make_batch, near
from verl.algorithms.opo import OPO, OPOConfig


def test_by_hand_on_ragged_rows_with_tool_tokens():
    """Sampled lengths 1, 3 | 2, 2: baselines (1 + 0) / 4 and (4 + 2) / 4."""
    batch = make_batch([1, 4, 2, 2], [1, 0, 2, 1], groups=[0, 0, 1, 1], masked=[(1, 1)])
    metrics = OPO(OPOConfig()).advantages(batch)
    near(batch["advantages"], [0.75, -0.25, 0, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5])
    near(batch["returns"], batch["advantages"])
    assert metrics["algorithm/groups"] == 2


def test_of_a_group_the_sum_over_tokens_is_zero():
    batch = make_batch([1, 5, 2, 9], [0.3, -1, 0.9, 0.4], groups=[0] * 4)
    OPO(OPOConfig()).advantages(batch)
    near(batch["advantages"].sum(), 0)


@pytest.mark.parametrize("scores", [[1.0] * 4, [0.7] * 8, [0.1] * 3, [0.7], [-2.0]])
def test_groups_that_teach_nothing_are_exactly_zero(scores):
    batch = make_batch([2, *[1] * (len(scores) - 1)], scores, groups=[3] * len(scores))
    OPO(OPOConfig()).advantages(batch)
    assert not batch["advantages"].any()


def test_empty_and_failed_responses_weigh_nothing():
    batch = make_batch([0, 2, 1, 3, 0, 0], [5, 1, 0, NAN, 1, 0], groups=[0, 0, 0, 0, 1, 1])
    metrics = OPO(OPOConfig()).advantages(batch)
    near(batch["advantages"], [1 / 3, 1 / 3, -2 / 3, 0, 0, 0])
    assert metrics["algorithm/rows_empty"] == 3 and metrics["algorithm/rows_excluded"] == 1
    alone = make_batch([0, 2], [5, 1], groups=[0, 0])
    OPO(OPOConfig()).advantages(alone)
    near(alone["advantages"], [0, 0])


def test_the_gradient_is_that_of_reinforce():
    batch = make_batch([1, 3], [1, 0], groups=[0, 0])
    algorithm = OPO(OPOConfig())
    assert algorithm.needs == frozenset() and algorithm.min_group_size == 2
    algorithm.advantages(batch)
    log_probs = torch.tensor([[-1.0, NAN, NAN], [-1.0, -2.0, -3.0]], requires_grad=True)
    loss = algorithm.actor_loss(log_probs, None, columns_of(batch, ["response_mask", "advantages"]))
    near(torch.autograd.grad(loss.sum, log_probs)[0], [[-0.75, 0, 0], [0.25, 0.25, 0.25]])
