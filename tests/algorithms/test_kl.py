import math

import pytest
import torch

from tests.algorithms.rows import near
from verl.algorithms.kl import AdaptiveKL, FixedKL, kl_estimate

LP, REF = -1.0, -1.5  # log-ratio 0.5
K3 = math.exp(-0.5) + 0.5 - 1


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", 0.5, 1.0),
        ("abs", 0.5, 1.0),
        ("k2", 0.125, 0.5),
        ("k3", K3, 1 - math.exp(-0.5)),
        ("k1+", 0.5, 0.5),
        ("abs+", 0.5, 0.5),
        ("k3+", K3, 0.5),
    ],
)
def test_value_and_gradient(estimator, value, slope):
    lp = torch.tensor(LP, requires_grad=True)
    kl = kl_estimate(lp, torch.tensor(REF), estimator)
    near(kl.detach(), value)
    (gradient,) = torch.autograd.grad(kl, lp)
    near(gradient, slope)


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"])
def test_a_policy_has_no_distance_from_itself(estimator):
    x = torch.tensor([-0.3, -7.0, 0.0])
    assert torch.equal(kl_estimate(x, x, estimator).abs(), torch.zeros(3))


def test_k2_and_plus_have_the_gradient_of_the_divergence():
    """Expectation over a softmax policy, summed exactly: d/dtheta KL(policy || reference)."""
    theta = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.5, 0.2, -0.4], dtype=torch.float64).log_softmax(0)
    lp = theta.log_softmax(0)
    (exact,) = torch.autograd.grad((lp.exp() * (lp - ref)).sum(), theta, retain_graph=True)
    for estimator in ("k2", "k1+", "k3+"):
        (got,) = torch.autograd.grad(
            (lp.exp().detach() * kl_estimate(lp, ref, estimator)).sum(), theta, retain_graph=True
        )
        near(got, exact, 1e-9)
    (zero,) = torch.autograd.grad((lp.exp().detach() * kl_estimate(lp, ref, "k1")).sum(), theta)
    near(zero, [0.0, 0.0, 0.0], 1e-9)


def test_far_apart_policies_stay_finite():
    lp = torch.tensor([-500.0, 0.0], requires_grad=True)
    kl = kl_estimate(lp, torch.tensor([0.0, -500.0]), "k3")
    near(kl.detach(), [10.0, 10.0])
    (gradient,) = torch.autograd.grad(kl.sum(), lp)
    assert torch.equal(gradient, torch.zeros(2))


def test_adaptive_coefficient_by_hand():
    kl = AdaptiveKL(0.1, target=0.05, horizon=100)
    kl.update(0.06, 10)  # error 0.2 (unclipped), 1 + 0.2 * 0.1
    assert kl.coef == pytest.approx(0.102)
    kl.update(0.0, 10)  # error -1 clipped to -0.2
    assert kl.coef == pytest.approx(0.102 * 0.98)


def test_adaptive_coefficient_stays_positive_and_finite():
    kl = AdaptiveKL(0.1, target=0.05, horizon=100)
    kl.update(0.0, 100_000)
    assert kl.coef == pytest.approx(0.08)
    kl.update(float("nan"), 10)
    kl.update(float("inf"), 10)
    assert kl.coef == pytest.approx(0.08)


def test_state_is_the_moved_coefficient():
    kl = AdaptiveKL(0.1, 0.05, 100)
    kl.update(1.0, 50)
    resumed = AdaptiveKL(0.1, 0.05, 100)
    resumed.load_state_dict(kl.state_dict())
    assert resumed.coef == kl.coef != 0.1
    fixed = FixedKL(0.3)
    fixed.load_state_dict(kl.state_dict())
    assert fixed.coef == 0.3 and fixed.state_dict() == {}
    switched_on = AdaptiveKL(0.2, 0.05, 100)
    switched_on.load_state_dict({})
    assert switched_on.coef == 0.2
