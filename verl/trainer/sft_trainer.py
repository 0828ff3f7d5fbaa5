"""Supervised fine-tuning: the policy learns the answers of conversations."""

from __future__ import annotations

from typing import Any

from verl.data.demonstrations import load_demonstrations
from verl.data.examples import ExampleDataset
from verl.trainer.offline_trainer import OfflineTrainer
from verl.trainer.run_loop import RunResult
from verl.trainer.sft_sections import SFTRun

__all__ = ["RunResult", "SFTTrainer"]


class SFTTrainer(OfflineTrainer[SFTRun]):
    """Trains a causal language model on conversations: of each, the assistant's turns are learned. Takes what
    ``OfflineTrainer`` takes."""

    Run = SFTRun
    default_algorithm = "sft"

    @classmethod
    def load(cls, config: SFTRun, source: Any, tokenizer: Any, key: str, max_rows: int | None) -> ExampleDataset:
        """As in OfflineTrainer."""
        return load_demonstrations(source, config.data, tokenizer, key=key, max_rows=max_rows)
