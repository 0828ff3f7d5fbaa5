"""GRPO: a response's advantage is its score compared with the other responses to its prompt. No critic."""

from __future__ import annotations

from typing import ClassVar, Literal

from verl.algorithms.base import AlgorithmConfig
from verl.algorithms.clipped_policy import ClippedPolicy, ClippedPolicyConfig
from verl.algorithms.kl import KLEstimator
from verl.algorithms.outcome import group_relative, read_outcome, write_outcome
from verl.batch import Batch


class GRPOConfig(ClippedPolicyConfig):
    """Keys of GRPO."""

    name: Literal["grpo"] = "grpo"
    """Entry of the algorithm table."""
    kl_estimator: KLEstimator | None = "k3"
    """Estimator of the KL divergence that is added to the loss; null is k3."""
    normalise_by_std: bool = True
    """Divide by the group's standard deviation; False leaves the score minus the group's mean."""


class GRPO(ClippedPolicy[GRPOConfig]):
    """Group relative policy optimisation.

    A_i = (s_i - mean(group)) / (std(group) + 1e-6) on every sampled token of response i, with the sample standard
    deviation (divisor n - 1). A group whose scores are equal up to float32 rounding, and a group of one, have
    advantage 0. Rows without a valid score are in no group.
    Source: Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, section 4.1. The defaults are the field's, not the
    paper's: no KL, mean over tokens, dual clip.
    """

    Config: ClassVar[type[AlgorithmConfig]] = GRPOConfig
    min_group_size: ClassVar[int] = 2

    def advantages(self, batch: Batch) -> dict[str, float]:
        """As in Algorithm; ``returns`` are the advantages."""
        outcome = read_outcome(batch, self.overlong)
        return write_outcome(batch, outcome, group_relative(outcome.groups, self.config.normalise_by_std))
