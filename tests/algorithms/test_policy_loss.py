import math

import pytest
import torch

from tests.algorithms.rows import near
from verl.algorithms.policy_loss import clipped_ratio_loss


def run(ratio, advantage, low=0.2, high=0.2, dual=3.0):
    lp = torch.tensor(math.log(ratio), requires_grad=True)
    terms = clipped_ratio_loss(
        lp, torch.tensor(0.0), torch.tensor(advantage), clip_low=low, clip_high=high, dual_clip=dual
    )
    (gradient,) = torch.autograd.grad(terms.loss, lp)
    return terms, terms.loss.item(), gradient.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "is_clipped", "is_lower"),
    [
        (1.0, 2.0, -2.0, -2.0, False, False),
        (1.1, 1.0, -1.1, -1.1, False, False),
        (1.5, 1.0, -1.2, 0.0, True, False),  # good token, already raised enough
        (0.5, 1.0, -0.5, -0.5, False, False),  # good token, lowered: full gradient
        (0.5, -1.0, 0.8, 0.0, True, False),  # bad token, already lowered enough
        (1.5, -1.0, 1.5, 1.5, False, False),  # bad token, raised: full gradient
        (5.0, -1.0, 3.0, 0.0, False, True),  # bad token, raised beyond the dual clip
        (5.0, 1.0, -1.2, 0.0, True, False),  # the dual clip leaves good tokens alone
        (5.0, 0.0, 0.0, 0.0, False, False),
    ],
)
def test_by_hand(ratio, advantage, loss, gradient, is_clipped, is_lower):
    terms, got, slope = run(ratio, advantage)
    assert got == pytest.approx(loss, abs=1e-6) and slope == pytest.approx(gradient, abs=1e-6)
    assert bool(terms.is_clipped) == is_clipped and bool(terms.is_clipped_lower) == is_lower


def test_bounds_are_separate():
    assert run(1.25, 1.0, high=0.28)[1:] == pytest.approx((-1.25, -1.25))
    assert run(1.25, 1.0, high=0.2)[1:] == pytest.approx((-1.2, 0.0))
    assert run(0.75, -1.0, low=0.3)[1:] == pytest.approx((0.75, 0.75))
    assert run(0.75, -1.0, low=0.2)[1:] == pytest.approx((0.8, 0.0))


def test_without_dual_clip():
    assert run(5.0, -1.0, dual=None)[1:] == pytest.approx((5.0, 5.0))


def test_far_ratios_stay_finite():
    lp = torch.tensor([-900.0, 900.0], requires_grad=True)
    terms = clipped_ratio_loss(
        lp, torch.zeros(2), torch.tensor([1.0, -1.0]), clip_low=0.2, clip_high=0.2, dual_clip=None
    )
    assert torch.isfinite(terms.loss).all() and torch.isfinite(torch.autograd.grad(terms.loss.sum(), lp)[0]).all()
    near(terms.ratio[0], math.exp(-20), 1e-12)
