"""The sections of a run on answers that are there already, and the checks that need two of them."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from verl.algorithms import ALGORITHMS
from verl.data.config import ExampleDataConfig
from verl.data.preferences import PreferenceDataConfig
from verl.trainer.base_sections import BaseTrainerConfig, Run


class OfflineTrainerConfig(BaseTrainerConfig):
    """Length of the run, size of a step, what is written where."""

    rows_per_step: int = Field(32, ge=1)
    """Examples that a step learns from: pairs, or single answers."""

    @property
    def rows_per_batch(self) -> int:
        """Examples of a batch."""
        return self.rows_per_step


class OfflineRun(Run):
    """A whole run that samples nothing."""

    data: ExampleDataConfig
    """Answers to train and validate on."""
    trainer: OfflineTrainerConfig = Field(default_factory=OfflineTrainerConfig)
    """Length of the run and its outputs."""

    @property
    def longest_example(self) -> tuple[int, str]:
        """Most tokens of what has to be in one micro-batch, and the keys that say so."""
        return self.data.max_example_tokens, "data.max_example_tokens"

    def idle_keys(self) -> dict[str, str]:
        """As in Run."""
        found = super().idle_keys()
        found["data.ground_truth_key"] = "no reward compares answers here"
        found["reference"] = "the starting policy's log-probs are computed by the actor, before its first update"
        found |= {f"placement.{role}": "the run has no such role" for role in ("critic", "reference", "rollout")}
        return found

    def conflicts(self) -> list[str]:
        """As in Run."""
        found = super().conflicts()
        longest, keys = self.longest_example
        budget = self.actor.max_tokens_per_micro_batch
        if longest > budget:
            found.append(
                f"an example of {keys} = {longest} tokens doesn't fit actor.max_tokens_per_micro_batch={budget}: raise "
                "that key or lower the other"
            )
        if self.actor.mini_batches_per_epoch > self.trainer.rows_per_step:
            found.append(
                f"actor.mini_batches_per_epoch={self.actor.mini_batches_per_epoch} is more than "
                f"trainer.rows_per_step={self.trainer.rows_per_step}"
            )
        return found


class PreferenceRun(OfflineRun):
    """A whole run of the preference family (DPO, KTO and their kin)."""

    family: ClassVar[str] = "preference"

    data: PreferenceDataConfig
    """Judged answers to train and validate on."""

    @property
    def is_paired(self) -> bool:
        """Whether the algorithm compares pairs."""
        return bool(ALGORITHMS.load(self.algorithm.name).is_paired)

    @property
    def longest_example(self) -> tuple[int, str]:
        """As in OfflineRun."""
        limit, key = super().longest_example
        return (2 * limit, f"2 * {key}") if self.is_paired else (limit, key)

    def idle_keys(self) -> dict[str, str]:
        """As in Run."""
        found = super().idle_keys()
        name = self.algorithm.name
        if not self.is_paired or self.data.judged_keys:
            reason = "data.judged_keys is given" if self.is_paired else f"algorithm {name!r} needs no pairs"
            found |= {f"data.{key}": reason for key in ("chosen_key", "rejected_key")}
        elif not self.data.judged_keys:
            reason = f"algorithm {name!r} reads pairs, and data.judged_keys isn't given"
            found |= {f"data.{key}": reason for key in ("response_key", "label_key")}
        return found
