"""Dr. GRPO: GRPO without the two divisions that favour some responses over others. No critic."""

from __future__ import annotations

from typing import ClassVar, Literal

from verl.algorithms.aggregate import Aggregation
from verl.algorithms.base import AlgorithmConfig
from verl.algorithms.clipped_policy import ClippedPolicy, ClippedPolicyConfig
from verl.algorithms.outcome import group_relative, read_outcome, write_outcome
from verl.batch import Batch


class DrGRPOConfig(ClippedPolicyConfig):
    """Keys of Dr. GRPO."""

    name: Literal["dr_grpo"] = "dr_grpo"
    """Entry of the algorithm table."""
    loss_aggregation: Aggregation = "seq-mean-token-sum-norm"
    """What losses of tokens are averaged over: responses, each the sum of its tokens over
    rollout.max_response_tokens, which scales the loss and chooses nothing."""


class DrGRPO(ClippedPolicy[DrGRPOConfig]):
    """Group relative policy optimisation done right.

    A_i = s_i - mean(group) on every sampled token of response i, and
    loss = sum over responses of the sum over their tokens / (responses * rollout.max_response_tokens).
    A group whose scores are equal up to float32 rounding, and a group of one, have advantage 0.
    Source: Liu et al. 2025, arXiv:2503.20783, section 3.2: no division by the group's deviation, none by the
    response's length, no KL. The dual clip is the field's.
    """

    Config: ClassVar[type[AlgorithmConfig]] = DrGRPOConfig
    min_group_size: ClassVar[int] = 2

    def advantages(self, batch: Batch) -> dict[str, float]:
        """As in Algorithm; ``returns`` are the advantages."""
        outcome = read_outcome(batch, self.overlong)
        return write_outcome(batch, outcome, group_relative(outcome.groups, by_std=False))
