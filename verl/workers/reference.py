"""The reference: the policy as it was at the start, frozen."""

from __future__ import annotations

from verl.batch import Batch
from verl.engines.base import Engine
from verl.models.lora import without_adapter


class Reference:
    """Infers log-probs of the frozen policy."""

    name = "reference"
    writes = "ref_log_probs"

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def infer(self, batch: Batch) -> None:
        """Write ``ref_log_probs``."""
        batch.put(self.writes, self.engine.infer(batch, "log_probs"))


class BaseReference(Reference):
    """The model below the policy's adapter, run by the policy's own engine: there is no second copy of it."""

    def infer(self, batch: Batch) -> None:
        with without_adapter(self.engine.network.module):
            super().infer(batch)
