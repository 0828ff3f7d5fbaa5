"""Which sections and which trainer a run has: by the family of its algorithm. The only table that knows."""

from __future__ import annotations

from typing import Any

from verl.algorithms import ALGORITHMS
from verl.common.registry import Registry
from verl.trainer.base_sections import Run

RUNS = Registry(
    "family of algorithms",
    {
        "on_policy": "verl.trainer.sections:OnPolicyRun",
        "preference": "verl.trainer.offline_sections:PreferenceRun",
        "supervised": "verl.trainer.sft_sections:SFTRun",
    },
)
"""Family -> the sections of its runs."""
TRAINERS = Registry(
    "family of algorithms",
    {
        "on_policy": "verl.trainer.ppo_trainer:PPOTrainer",
        "preference": "verl.trainer.preference_trainer:PreferenceTrainer",
        "supervised": "verl.trainer.sft_trainer:SFTTrainer",
    },
)
"""Family -> its trainer."""


def run_class(algorithm: str) -> type[Run]:
    """The sections of a run with ``algorithm``. Raises UnknownName with the nearest known name."""
    found: type[Run] = RUNS.load(ALGORITHMS.load(algorithm).family)
    return found


def trainer_class(config: Run) -> Any:
    """The trainer of a run: a ``RunLoop``."""
    return TRAINERS.load(config.family)
