"""CISPO: REINFORCE with clipped importance weights, so that no token loses its gradient. Advantages as GRPO's."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from verl.algorithms.base import AlgorithmConfig
from verl.algorithms.clipped_policy import RatioPolicy, RatioPolicyConfig
from verl.algorithms.outcome import group_relative, read_outcome, write_outcome
from verl.algorithms.policy_loss import PolicyTerms
from verl.batch import Batch


class CISPOConfig(RatioPolicyConfig):
    """Keys of CISPO."""

    name: Literal["cispo"] = "cispo"
    """Entry of the algorithm table."""
    clip_low: float = Field(default=1.0, gt=0, le=1)
    """How far below 1 a token's weight may be; 1 is no lower bound."""
    clip_high: float = Field(default=4.0, gt=0)
    """How far above 1 a token's weight may be."""
    normalise_by_std: bool = True
    """Divide by the group's standard deviation; False leaves the score minus the group's mean."""


class CISPO(RatioPolicy[CISPOConfig]):
    """Clipped importance-sampling policy optimisation.

    A_i    = (score_i - mean(group)) / (std(group) + 1e-6), as in GRPO
    weight = clip(exp(log_prob - old_log_prob), 1 - clip_low, 1 + clip_high), without gradient
    loss   = -weight * A * log_prob, the mean over all tokens of the update
    Source: MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, eq. 4 and 5, without a lower bound as in its text. It names no
    upper one: 5 as the largest weight is ours.
    """

    Config: ClassVar[type[AlgorithmConfig]] = CISPOConfig
    min_group_size: ClassVar[int] = 2

    def advantages(self, batch: Batch) -> dict[str, float]:
        """As in Algorithm; ``returns`` are the advantages."""
        outcome = read_outcome(batch, self.overlong)
        return write_outcome(batch, outcome, group_relative(outcome.groups, self.config.normalise_by_std))

    def policy_terms(self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> PolicyTerms:
        """As in RatioPolicy; ``is_clipped`` is where the weight is held at a bound."""
        ratio = (log_probs.detach() - old_log_probs).clamp(-20, 20).exp()
        weight = ratio.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        none = torch.zeros_like(mask)
        return PolicyTerms(-weight * advantages * log_probs, ratio, weight != ratio, none)
