"""Training on answers that somebody judged: DPO, KTO and their kin. They differ only in what they declare."""

from __future__ import annotations

from typing import Any

from verl.data.examples import ExampleDataset
from verl.data.preferences import load_preferences
from verl.trainer.offline_sections import PreferenceRun
from verl.trainer.offline_trainer import OfflineTrainer
from verl.trainer.run_loop import RunResult

__all__ = ["PreferenceTrainer", "RunResult"]


class PreferenceTrainer(OfflineTrainer[PreferenceRun]):
    """Trains a causal language model with DPO, KTO and their family. Takes what ``OfflineTrainer`` takes."""

    Run = PreferenceRun
    default_algorithm = "dpo"

    @classmethod
    def load(cls, config: PreferenceRun, source: Any, tokenizer: Any, key: str, max_rows: int | None) -> ExampleDataset:
        """As in OfflineTrainer."""
        return load_preferences(source, config.data, tokenizer, is_paired=config.is_paired, key=key, max_rows=max_rows)
