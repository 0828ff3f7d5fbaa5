"""Weights for tokens that were sampled by a policy other than the one that trains on them.

The sampler's log-probs differ from the trainer's by kernels, precision or weight version. In come both and a mask,
out go detached weights and how they look. What the weights multiply is the caller's.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from verl.algorithms.base import Metrics, changed
from verl.algorithms.masked import masked_max, masked_sum
from verl.common.section import Section


class CorrectionConfig(Section):
    """How the policy loss is weighted where rollout and training log-probs differ."""

    mode: Literal["auto", "none", "token", "sequence"] = "auto"
    """One weight a token, or one a response (the product over its sampled tokens); none leaves the loss as it is. auto:
    token where sampler and trainer round differently (bfloat16), none in float32, where the weights are 1."""
    kind: Literal["truncate", "mask"] = "truncate"
    """Above ``cap``: truncate lowers the weight to it; mask drops what lies outside [1 / cap, cap]."""
    cap: float = Field(default=2.0, gt=1)
    """Largest weight, a ratio of probabilities."""

    def ineffective_keys(self) -> list[str]:
        """Keys that were changed while the mode is none."""
        if self.mode != "none":
            return []
        return [f"correction.{key} (correction.mode is none)" for key in ("kind", "cap") if changed(self, key)]


def correction_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, config: CorrectionConfig
) -> tuple[Tensor, Metrics]:
    """Importance weights of the training policy over the sampling policy; ``config.mode`` is token or sequence.

    old_log_probs      [B, R] float  under the actor before the update
    rollout_log_probs  [B, R] float  under the sampler
    Returns weights [B, R] float32, detached, 0 outside the mask, and metrics.

    ratio  = exp(clamp(x, +-20)), x = old - rollout a token, or its sum over the response's sampled tokens
    weight = min(ratio, cap)  or  ratio where 1 / cap <= ratio <= cap, else 0
    A weight of 0 leaves a token out of the policy loss; the count that the loss is divided by stays, so it is the
    same whatever the weights.
    Source: truncated: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training";
    masked: Ling team 2025 (IcePop), arXiv:2510.18855. Our lower bound is 1 / cap, one key for both sides.
    """
    log_ratio = torch.where(mask, old_log_probs.detach() - rollout_log_probs.detach(), 0.0)
    if config.mode == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
    ratio = log_ratio.clamp(-20, 20).exp()
    is_high, is_low = ratio > config.cap, ratio < 1 / config.cap
    if config.kind == "truncate":
        weights, is_touched = ratio.clamp(max=config.cap), is_high
    else:
        weights, is_touched = torch.where(is_high | is_low, 0.0, ratio), is_high | is_low
    weights = torch.where(mask, weights, 0.0)
    tokens = mask.sum().float()
    return weights, {
        "actor/correction_weight/mean": (weights.sum(), tokens),
        "actor/correction_weight/max": (masked_max(weights, mask), tokens),
        "actor/correction_touched_frac": (masked_sum(is_touched.float(), mask), tokens),
    }


def rollout_diff(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Metrics:
    """How far the sampler's log-probs are from the trainer's: absolute mean and max, and KL(rollout || training)."""
    diff = torch.where(mask, rollout_log_probs.detach() - old_log_probs.detach(), 0.0)
    tokens = mask.sum().float()
    return {
        "actor/rollout_log_prob_diff/mean": (diff.abs().sum(), tokens),
        "actor/rollout_log_prob_diff/max": (masked_max(diff.abs(), mask), tokens),
        "actor/rollout_kl": (diff.sum(), tokens),
    }
