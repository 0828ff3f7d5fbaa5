"""Training on answers that somebody judged: DPO, KTO and their kin. They differ only in what they declare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.data.examples import ExampleDataset
from verl.data.preferences import load_preferences
from verl.trainer.callbacks import Callback
from verl.trainer.inputs import given_sections
from verl.trainer.offline_sections import PreferenceRun
from verl.trainer.offline_trainer import OfflineTrainer
from verl.trainer.placement import serve_rank_0
from verl.trainer.run_loop import RunResult

__all__ = ["PreferenceTrainer", "RunResult"]


class PreferenceTrainer(OfflineTrainer[PreferenceRun]):
    """Trains a causal language model with DPO, KTO and their family.

    model      folder or hub name, a transformers module, or the keys of the ``model`` section
    data       file, folder, list of mappings, ``datasets.Dataset``, or the keys of the ``data`` section
    tokenizer  a tokenizer or where to load it from; default: beside the model
    val        held-out rows, as ``data``
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
        algorithm: str | Mapping[str, Any] = "dpo",
        callbacks: list[Callback] | None = None,
        **sections: Any,
    ) -> None:
        serve_rank_0()
        keys, given = given_sections(model, tokenizer, data, val)
        self._set_up(PreferenceRun.parse({**keys, "algorithm": algorithm, **sections}), given, callbacks)

    @classmethod
    def load(cls, config: PreferenceRun, source: Any, tokenizer: Any, key: str, max_rows: int | None) -> ExampleDataset:
        """As in OfflineTrainer."""
        return load_preferences(source, config.data, tokenizer, is_paired=config.is_paired, key=key, max_rows=max_rows)
