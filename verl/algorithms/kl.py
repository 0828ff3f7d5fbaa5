"""Estimates of the KL divergence between two policies from the log-probs of sampled tokens, and its coefficient.

Knows log-probs; not whether the estimate goes into a reward or a loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"]
"""``+``: the value of the estimator with the gradient of k2."""


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: KLEstimator) -> Tensor:
    """KL(policy || reference) of each token, from tokens sampled by the policy; any shape, in nats.

    With d = ref - log_prob:
    k1   -d                 unbiased, may be negative; its gradient is 0 on average, so it is no use inside a loss
    abs  |d|
    k2   d^2 / 2            biased, its gradient is that of KL(policy || reference) for on-policy tokens
    k3   exp(d) - d - 1     unbiased, never negative; its gradient is that of KL(reference || policy)
    k3 clamps d to +-20 and the estimate to +-10, and has no gradient where clamped.
    Source: Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html; gradients: Tang and Munos
    2025, arXiv:2506.09477.
    """
    if estimator.endswith("+"):
        slope = kl_estimate(log_probs, ref_log_probs, "k2")
        return slope - slope.detach() + _value(log_probs, ref_log_probs, estimator[:-1]).detach()
    return _value(log_probs, ref_log_probs, estimator)


def _value(log_probs: Tensor, ref_log_probs: Tensor, estimator: str) -> Tensor:
    log_ratio = log_probs - ref_log_probs
    if estimator == "k1":
        return log_ratio
    if estimator == "abs":
        return log_ratio.abs()
    if estimator == "k2":
        return log_ratio.square() / 2
    assert estimator == "k3", estimator
    d = (-log_ratio).clamp(-20, 20)
    return (torch.expm1(d) - d).clamp(-10, 10)


class FixedKL:
    """A coefficient that stays what the config says."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, rows: int) -> None:
        """Nothing moves."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a resumed run takes the coefficient from its config."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to take up."""


class AdaptiveKL(FixedKL):
    """A coefficient that rises while the KL is above ``target`` and falls while it is below.

    coef <- coef * (1 + clip(kl / target - 1, -0.2, 0.2) * min(rows / horizon, 1))
    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2. We bound rows / horizon by 1: a batch larger than five
    horizons would otherwise turn the coefficient negative. A KL that isn't finite leaves it as it is.
    """

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        super().__init__(coef)
        self.target, self.horizon = target, horizon

    def update(self, kl: float, rows: int) -> None:
        """Move the coefficient by one step's mean KL over ``rows`` responses."""
        if math.isfinite(kl):
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * min(rows / self.horizon, 1.0)

    def state_dict(self) -> dict[str, Any]:
        """The coefficient as it stands."""
        return {"kl_coef": self.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the coefficient up where it stood; a state without one leaves the config's."""
        self.coef = float(state.get("kl_coef", self.coef))
