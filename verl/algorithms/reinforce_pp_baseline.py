"""REINFORCE++ with baseline: scores less their group's mean, then whitened over the whole step. No critic."""

from __future__ import annotations

from typing import ClassVar, Literal

from verl.algorithms.base import AlgorithmConfig
from verl.algorithms.clipped_policy import ClippedPolicy, ClippedPolicyConfig
from verl.algorithms.kl import KLEstimator
from verl.algorithms.masked import whiten
from verl.algorithms.outcome import over_tokens, read_outcome, write_advantages
from verl.batch import Batch


class ReinforcePPBaselineConfig(ClippedPolicyConfig):
    """Keys of REINFORCE++ with baseline."""

    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    """Entry of the algorithm table."""
    kl_estimator: KLEstimator | None = "k2"
    """Estimator of the KL divergence that is added to the loss; null is k3."""


class ReinforcePPBaseline(ClippedPolicy[ReinforcePPBaselineConfig]):
    """REINFORCE++ with the group's mean as baseline.

    R_i = score_i - mean(group) on every sampled token of response i; 0 in a group of equals or of one
    A_i = (R_i - mean) / sqrt(var + 1e-8), both over all sampled tokens of the step; 0 if all are equal
    Source: Hu et al. 2025 (REINFORCE++), arXiv:2501.03262, its variant with baseline; its KL is k2 in the loss.
    Deviations of single groups play no part. The mean over tokens isn't 0 where lengths differ, so that a group of
    equals has the small advantage -mean / sqrt(var).
    """

    Config: ClassVar[type[AlgorithmConfig]] = ReinforcePPBaselineConfig
    min_group_size: ClassVar[int] = 2

    def advantages(self, batch: Batch) -> dict[str, float]:
        """As in Algorithm; ``returns`` are the advantages before whitening."""
        outcome = read_outcome(batch, self.overlong)
        mask = outcome.credit.mask
        returns = over_tokens(outcome.groups.centred, mask)
        return write_advantages(batch, outcome, outcome.credit.token_rewards, whiten(returns, mask), returns)
