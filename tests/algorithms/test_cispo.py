import math

import pytest
import torch

from tests.algorithms.rows import NAN, columns_of, make_batch, near
from verl.algorithms.cispo import CISPO, CISPOConfig


def test_advantages_are_those_of_a_group():
    batch = make_batch([1, 3, 2, 1], [1, 0, 0, 0], groups=[4] * 4, masked=[(1, 1), (2, 1)])
    CISPO(CISPOConfig()).advantages(batch)
    near(batch["advantages"], [1.5, -0.5, 0, -0.5, -0.5, 0, -0.5])
    CISPO(CISPOConfig(normalise_by_std=False)).advantages(batch)
    near(batch["advantages"], [0.75, -0.25, 0, -0.25, -0.25, 0, -0.25])


@pytest.mark.parametrize("scores", [[1.0] * 4, [0.7] * 8, [0.7], [-2.0]])
def test_groups_that_teach_nothing_are_exactly_zero(scores):
    batch = make_batch([2] * len(scores), scores, groups=[3] * len(scores))
    CISPO(CISPOConfig()).advantages(batch)
    assert not batch["advantages"].any()


def test_weights_by_hand_on_ragged_rows():
    """Ratios 1.5, 0.5 | 1.1 of rows around a tool token, clipped to [0.8, 1.2]: no token loses its gradient."""
    old = torch.tensor([[-1.0, NAN, -2.0], [-0.5, NAN, NAN], [NAN, NAN, NAN]])
    ratios = torch.tensor([[1.5, NAN, 0.5], [1.1, NAN, NAN], [NAN, NAN, NAN]])
    log_probs = (old + ratios.log()).requires_grad_()
    data = {
        "advantages": torch.tensor([[2.0, NAN, 2.0], [-1.0, NAN, NAN], [NAN] * 3]),
        "response_mask": torch.tensor([[True, False, True], [True, False, False], [False] * 3]),
        "old_log_probs": old,
    }
    loss = CISPO(CISPOConfig(clip_low=0.2, clip_high=0.2)).actor_loss(log_probs, None, data)
    near(torch.autograd.grad(loss.sum, log_probs)[0], [[-2.4, 0, -1.6], [1.1, 0, 0], [0, 0, 0]])
    lp = [math.log(1.5) - 1, math.log(0.5) - 2, math.log(1.1) - 0.5]
    near(loss.sum.detach(), -2.4 * lp[0] - 1.6 * lp[1] + 1.1 * lp[2])
    near(loss.count, 3)
    near(torch.stack(loss.metrics["actor/clip_frac"]), [2, 3])
    near(loss.metrics["actor/ratio/max"][0], 1.5)


def test_by_default_only_weights_above_five_are_held():
    ratios = torch.tensor([[0.01, 4.9, 7.0]])
    log_probs = (ratios.log() - 3).requires_grad_()
    data = {
        "advantages": torch.ones(1, 3),
        "response_mask": torch.ones(1, 3, dtype=torch.bool),
        "old_log_probs": torch.full((1, 3), -3.0),
    }
    loss = CISPO(CISPOConfig()).actor_loss(log_probs, None, data)
    near(torch.autograd.grad(loss.sum, log_probs)[0], [[-0.01, -4.9, -5]])
    near(torch.stack(loss.metrics["actor/clip_frac"]), [1, 3])


def test_on_policy_the_gradient_is_the_policy_gradient():
    batch = make_batch([1, 2], [1, 0], groups=[0, 0])
    algorithm = CISPO(CISPOConfig(normalise_by_std=False))
    algorithm.advantages(batch)
    log_probs = torch.tensor([[-1.0, NAN], [-1.0, -2.0]], requires_grad=True)
    loss = algorithm.actor_loss(log_probs, None, columns_of(batch, ["response_mask", "advantages"]))
    near(torch.autograd.grad(loss.sum, log_probs)[0], [[-0.5, 0], [0.5, 0.5]])
    near(loss.metrics["actor/clip_frac"][0], 0)
