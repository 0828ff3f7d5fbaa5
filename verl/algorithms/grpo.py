"""GRPO: a response's advantage is its score compared with the other responses to its prompt. No critic."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from verl.algorithms.base import AlgorithmConfig
from verl.algorithms.clipped_policy import ClippedPolicy, ClippedPolicyConfig
from verl.algorithms.credit import assign_credit, credit_metrics
from verl.algorithms.group import group_metrics, group_stats
from verl.algorithms.kl import KLEstimator
from verl.batch import Batch

_EPS = 1e-6


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

    @property
    def needs(self) -> frozenset[str]:
        """The reference, where its KL has a weight."""
        return frozenset({"reference"}) if self.config.kl_coef > 0 else frozenset()

    @property
    def trains(self) -> tuple[str, ...]:
        """The actor alone."""
        return ("actor",)

    def advantages(self, batch: Batch) -> dict[str, float]:
        """As in Algorithm; ``returns`` are the advantages."""
        credit = assign_credit(batch)
        stats = group_stats(credit.scores, batch["group_id"].to(credit.mask.device), credit.keep)
        per_row = stats.centred / (stats.std + _EPS) if self.config.normalise_by_std else stats.centred
        advantages = torch.where(credit.mask, per_row.float()[:, None], 0.0)
        batch.put_padded("token_rewards", credit.token_rewards)
        batch.put_padded("advantages", advantages)
        batch.put_padded("returns", advantages)
        return credit_metrics(credit, advantages) | group_metrics(stats)
