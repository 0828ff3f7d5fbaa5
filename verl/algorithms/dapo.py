"""DAPO: GRPO with a higher upper clip, the mean over tokens, no KL, and only groups that teach something. No critic."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from verl.algorithms.base import AlgorithmConfig
from verl.algorithms.clipped_policy import ClippedPolicy, ClippedPolicyConfig
from verl.algorithms.credit import counted_rows
from verl.algorithms.group import group_stats
from verl.algorithms.outcome import group_relative, read_outcome, write_outcome
from verl.batch import Batch


class DAPOConfig(ClippedPolicyConfig):
    """Keys of DAPO."""

    name: Literal["dapo"] = "dapo"
    """Entry of the algorithm table."""
    clip_high: float = Field(default=0.28, gt=0)
    """How far above 1 the ratio may rise; more than below, so that rare tokens can become likely."""
    max_generations: int = Field(default=10, ge=1)
    """Batches of prompts that a step draws at most to find trainer.prompts_per_step groups of unequal scores."""


class DAPO(ClippedPolicy[DAPOConfig]):
    """Decoupled clip and dynamic sampling policy optimisation.

    A_i  = (score_i - mean(group)) / (std(group) + 1e-6), as in GRPO; the scores less what ``overlong`` takes
    loss = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high)), the mean over all tokens of the update
    Groups whose scores are all equal, before ``overlong``, aren't trained on: others are drawn in their place.
    Source: Yu et al. 2025, arXiv:2503.14476, eq. 8 to 13. The dual clip is the field's, not the paper's.
    """

    Config: ClassVar[type[AlgorithmConfig]] = DAPOConfig
    min_group_size: ClassVar[int] = 2

    @property
    def max_generations(self) -> int:
        """The config's."""
        return self.config.max_generations

    def keeps(self, batch: Batch) -> Tensor:
        """[B] bool: rows of groups in which two valid scores differ by more than float32 rounding."""
        rows = counted_rows(batch)
        groups = group_stats(batch["scores"], batch["group_id"], rows)
        return (groups.size > 1) & ~groups.is_equal

    def advantages(self, batch: Batch) -> dict[str, float]:
        """As in Algorithm; ``returns`` are the advantages."""
        outcome = read_outcome(batch, self.overlong)
        return write_outcome(batch, outcome, group_relative(outcome.groups, by_std=True))
