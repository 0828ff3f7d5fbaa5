import math

import pytest
import torch

from tests.algorithms.rows import NAN, columns_of, make_batch, near
from verl.algorithms.gspo import GSPO, GSPOConfig

WIDE = GSPOConfig(clip_low=0.5, clip_high=0.5)


def columns(advantages, mask, old):
    return {
        "advantages": torch.tensor(advantages),
        "response_mask": torch.tensor(mask),
        "old_log_probs": torch.tensor(old),
    }


def test_advantages_are_those_of_a_group():
    batch = make_batch([1, 3, 2, 1], [1, 0, 0, 0], groups=[4] * 4, masked=[(1, 1), (2, 1)])
    GSPO(GSPOConfig()).advantages(batch)
    near(batch["advantages"], [1.5, -0.5, 0, -0.5, -0.5, 0, -0.5])
    GSPO(GSPOConfig(normalise_by_std=False)).advantages(batch)
    near(batch["advantages"], [0.75, -0.25, 0, -0.25, -0.25, 0, -0.25])


@pytest.mark.parametrize("scores", [[1.0] * 4, [0.7] * 8, [0.7], [-2.0]])
def test_groups_that_teach_nothing_are_exactly_zero(scores):
    batch = make_batch([2] * len(scores), scores, groups=[3] * len(scores))
    GSPO(GSPOConfig()).advantages(batch)
    assert not batch["advantages"].any()


def test_loss_and_gradient_by_hand_on_ragged_rows():
    """Log-ratios 0.1 and 0.3 around a tool token: ratio e^0.2 for both tokens. The second row has one token."""
    mask = [[True, False, True], [True, False, False], [False, False, False]]
    data = columns([[2.0, NAN, 2.0], [-1.0, NAN, NAN], [NAN] * 3], mask, [[-1, NAN, -1], [-1, NAN, NAN], [NAN] * 3])
    log_probs = torch.tensor([[-0.9, NAN, -0.7], [-1.2, NAN, NAN], [NAN] * 3], requires_grad=True)
    loss = GSPO(WIDE).actor_loss(log_probs, None, data)
    up, down = math.exp(0.2), math.exp(-0.2)
    near(loss.sum.detach(), -2 * up + down)
    near(loss.count, 2)
    near(torch.autograd.grad(loss.sum, log_probs)[0], [[-up, 0, -up], [down, 0, 0], [0, 0, 0]])
    near(torch.stack(loss.metrics["actor/ratio/mean"]), [2 * up + down, 3])


def test_the_gradient_is_that_of_the_sequence_ratio():
    log_probs = torch.tensor([[-0.9, -0.7, -1.3]], requires_grad=True)
    old = torch.tensor([[-1.0, -1.0, -1.0]])
    by_token = GSPO(WIDE).actor_loss(log_probs, None, columns([[0.7] * 3], [[True] * 3], old.tolist())).sum
    by_sequence = -0.7 * (log_probs - old).mean().exp()
    near(by_token.detach(), by_sequence.detach())
    near(*(torch.autograd.grad(x, log_probs)[0] for x in (by_token, by_sequence)))


def test_a_response_is_clipped_as_a_whole():
    """Ratios 1.001, 1.0002 and 0.999 for advantages that push further the same way, and back."""
    mask = [[True, True]] * 4
    steps = torch.tensor([math.log(1.001), math.log(1.0002), math.log(0.999), math.log(1.001)])
    log_probs = (-1 + steps[:, None] * torch.tensor([[2.0, 0.0]])).requires_grad_()
    data = columns([[1.0] * 2, [1.0] * 2, [-1.0] * 2, [-1.0] * 2], mask, [[-1.0] * 2] * 4)
    loss = GSPO(GSPOConfig()).actor_loss(log_probs, None, data)
    (gradient,) = torch.autograd.grad(loss.sum, log_probs)
    assert gradient.ne(0).any(1).tolist() == [False, True, False, True]
    near(loss.sum.detach(), -1.0004 - 1.0002 + 0.9997 + 1.001)
    near(torch.stack(loss.metrics["actor/clip_frac"]), [4, 8])


def test_on_policy_the_ratio_is_exactly_one():
    batch = make_batch([1, 2], [1, 0], groups=[0, 0])
    algorithm = GSPO(GSPOConfig())
    algorithm.advantages(batch)
    log_probs = torch.tensor([[-17.3, NAN], [-0.1, -2.7]], requires_grad=True)
    loss = algorithm.actor_loss(log_probs, None, columns_of(batch, ["response_mask", "advantages"]))
    assert loss.metrics["actor/ratio/max"][0] == loss.metrics["actor/ratio/min"][0] == 1
    half = 0.5**0.5
    near(torch.autograd.grad(loss.sum, log_probs)[0], [[-half, 0], [half / 2, half / 2]])


def test_a_ratio_out_of_all_bounds_stays_finite():
    data = columns([[-1.0]], [[True]], [[-900.0]])
    log_probs = torch.tensor([[-1.0]], requires_grad=True)
    loss = GSPO(WIDE).actor_loss(log_probs, None, data)
    near(loss.sum.detach(), math.exp(10))
    near(torch.autograd.grad(loss.sum, log_probs)[0], [[0.0]])
