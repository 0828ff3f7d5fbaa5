"""OPO: a group's baseline is its mean score weighted by length, the one of least variance. No critic."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from verl.algorithms.base import AlgorithmConfig
from verl.algorithms.clipped_policy import ClippedPolicy, ClippedPolicyConfig
from verl.algorithms.group import GroupStats, group_sum
from verl.algorithms.outcome import read_outcome, write_outcome
from verl.batch import Batch


class OPOConfig(ClippedPolicyConfig):
    """Keys of OPO."""

    name: Literal["opo"] = "opo"
    """Entry of the algorithm table."""


class OPO(ClippedPolicy[OPOConfig]):
    """On-policy RL with optimal reward baseline.

    b   = sum over the group of length * score / sum of length, length being that of the sampled tokens
    A_i = score_i - b on every sampled token of response i; 0 in a group of equals or of one
    Source: Hao et al. 2025, arXiv:2505.23585, which makes one update a batch, where the ratio is 1, without KL and
    entropy terms; further updates are clipped as PPO's.
    """

    Config: ClassVar[type[AlgorithmConfig]] = OPOConfig
    min_group_size: ClassVar[int] = 2

    def advantages(self, batch: Batch) -> dict[str, float]:
        """As in Algorithm; ``returns`` are the advantages."""
        outcome = read_outcome(batch, self.overlong)
        lengths = outcome.credit.mask.sum(1)
        return write_outcome(batch, outcome, above_weighted_mean(outcome.groups, lengths))


def above_weighted_mean(groups: GroupStats, weights: Tensor) -> Tensor:
    """[B] float64: each score minus its group's mean with ``weights`` [B], 0 on rows that aren't kept.

    A group whose weights are all 0 keeps its plain mean.
    """
    total = group_sum(weights.double(), groups)
    return groups.centred - group_sum(weights * groups.centred, groups) / total.clamp(min=1)
