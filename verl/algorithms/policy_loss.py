"""The clipped surrogate of PPO, a number a token. Knows log-probs, advantages and a mask; doesn't sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyTerms:
    """All [B, R]; what stands outside the mask means nothing.

    loss              with gradient
    ratio             policy now over old policy, detached
    is_clipped        where the clipped surrogate is the larger one, so that the token has no gradient (where a loss
                      clips a weight that has none anyway: where it does)
    is_clipped_lower  where the dual clip holds a negative advantage's loss down
    """

    loss: Tensor
    ratio: Tensor
    is_clipped: Tensor
    is_clipped_lower: Tensor


def clipped_ratio_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> PolicyTerms:
    """PPO's pessimistic surrogate, negated, for tokens [B, R] that hold finite numbers.

    ratio = exp(clamp(log_prob - old_log_prob, +-20))
    loss  = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))
    and with ``dual_clip`` = c, where A < 0: loss = min(loss, -A * c).
    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; asymmetric bounds: Yu et al. 2025, arXiv:2503.14476, eq. 10;
    dual clip: Ye et al. 2020, arXiv:1912.09729. The ratio's log-probs are of single tokens, both from training
    passes over the full distribution at the sampling temperature.
    """
    ratio = (log_probs - old_log_probs).clamp(-20, 20).exp()
    return clipped_surrogate(ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> PolicyTerms:
    """The loss of ``clipped_ratio_loss`` for a ratio [B, R], of whatever, that carries the gradient."""
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    is_clipped_lower = torch.zeros_like(loss, dtype=torch.bool)
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        is_clipped_lower = (advantages < 0) & (loss > ceiling)
        loss = torch.where(advantages < 0, torch.minimum(loss, ceiling), loss)
    return PolicyTerms(loss, ratio.detach(), (clipped > plain).detach(), is_clipped_lower.detach())
