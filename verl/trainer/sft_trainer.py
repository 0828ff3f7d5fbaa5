"""Supervised fine-tuning: the policy learns the answers of conversations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.data.demonstrations import load_demonstrations
from verl.data.examples import ExampleDataset
from verl.trainer.callbacks import Callback
from verl.trainer.inputs import given_sections
from verl.trainer.offline_trainer import OfflineTrainer
from verl.trainer.placement import serve_rank_0
from verl.trainer.run_loop import RunResult
from verl.trainer.sft_sections import SFTRun

__all__ = ["RunResult", "SFTTrainer"]


class SFTTrainer(OfflineTrainer[SFTRun]):
    """Trains a causal language model on conversations: of each, the assistant's turns are learned.

    model      folder or hub name, a transformers module, or the keys of the ``model`` section
    data       file, folder, list of mappings, ``datasets.Dataset``, or the keys of the ``data`` section
    tokenizer  a tokenizer or where to load it from; default: beside the model
    val        held-out conversations, as ``data``
    algorithm  name or keys of the ``algorithm`` section
    callbacks  instead of those that the config asks for (``default_callbacks``), which also write metrics and save
    sections   actor, validation, trainer, track, profile: keys as in a YAML config

    Under torchrun ranks other than 0 serve in the constructor and leave with SystemExit(0), as in ``PPOTrainer``.

    Raises ConfigError or DataError for anything wrong before a model is loaded, where it can be known by then.
    """

    def __init__(
        self,
        model: Any,
        data: Any,
        *,
        tokenizer: Any = None,
        val: Any = None,
        algorithm: str | Mapping[str, Any] = "sft",
        callbacks: list[Callback] | None = None,
        **sections: Any,
    ) -> None:
        serve_rank_0()
        keys, given = given_sections(model, tokenizer, data, val)
        self._set_up(SFTRun.parse({**keys, "algorithm": algorithm, **sections}), given, callbacks)

    @classmethod
    def load(cls, config: SFTRun, source: Any, tokenizer: Any, key: str, max_rows: int | None) -> ExampleDataset:
        """As in OfflineTrainer."""
        return load_demonstrations(source, config.data, tokenizer, key=key, max_rows=max_rows)
