"""GSPO: the ratio of whole responses instead of tokens, clipped as a whole. Advantages as GRPO's, no critic."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from verl.algorithms.aggregate import Aggregation
from verl.algorithms.base import AlgorithmConfig
from verl.algorithms.clipped_policy import RatioPolicy, RatioPolicyConfig
from verl.algorithms.masked import masked_mean
from verl.algorithms.outcome import group_relative, read_outcome, write_outcome
from verl.algorithms.policy_loss import PolicyTerms, clipped_surrogate
from verl.batch import Batch


class GSPOConfig(RatioPolicyConfig):
    """Keys of GSPO."""

    name: Literal["gspo"] = "gspo"
    """Entry of the algorithm table."""
    clip_low: float = Field(default=3e-4, gt=0, le=1)
    """How far below 1 the ratio of a response may fall before its gradient stops."""
    clip_high: float = Field(default=4e-4, gt=0)
    """How far above 1 it may rise."""
    loss_aggregation: Aggregation = "seq-mean-token-mean"
    """What losses of tokens are averaged over; by default each response counts once."""
    normalise_by_std: bool = True
    """Divide by the group's standard deviation; False leaves the score minus the group's mean."""


class GSPO(RatioPolicy[GSPOConfig]):
    """Group sequence policy optimisation.

    A_i   = (score_i - mean(group)) / (std(group) + 1e-6), as in GRPO
    ratio = exp(mean over the sampled tokens of response i of log_prob - old_log_prob), at most e^10
    loss  = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high)), one a response
    Every token carries its response's loss and 1 / length of its gradient: with seq-mean-token-mean loss and gradient
    are those of the formula.
    Source: Zheng et al. 2025, arXiv:2507.18071, section 4 (in the form of GSPO-token); bounds of section 5.1. The
    paper has no KL and no dual clip.
    """

    Config: ClassVar[type[AlgorithmConfig]] = GSPOConfig
    min_group_size: ClassVar[int] = 2

    def advantages(self, batch: Batch) -> dict[str, float]:
        """As in Algorithm; ``returns`` are the advantages."""
        outcome = read_outcome(batch, self.overlong)
        return write_outcome(batch, outcome, group_relative(outcome.groups, self.config.normalise_by_std))

    def policy_terms(self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> PolicyTerms:
        """As in RatioPolicy; all tokens of a row have the same ratio."""
        of_row = masked_mean(log_probs.detach() - old_log_probs, mask, dim=1)[:, None]
        ratio = (log_probs - log_probs.detach() + of_row).clamp(max=10).exp()
        c = self.config
        return clipped_surrogate(ratio, advantages, clip_low=c.clip_low, clip_high=c.clip_high, dual_clip=None)
