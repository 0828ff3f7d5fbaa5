"""What a run is made of, whatever its family: the roles that run models, an algorithm, data and their order.

Nothing here makes them (``roles.py``, ``assembly.py``, ``offline_assembly.py``) or trains.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.algorithms.base import Algorithm
from verl.controller import Controller, WorkerGroup
from verl.data.loader import Loader
from verl.hybrid_engine.colocated import SharedWeights
from verl.models.attention import ATTENTION
from verl.observe.flops import ModelShape
from verl.observe.memory import peak_memory_bytes, reset_peak_memory
from verl.trainer.measures import Compute
from verl.workers.reference import Reference
from verl.workers.remote import RemoteWeights
from verl.workers.trained import Critic, TrainedRole


@dataclass
class Sampler:
    """What samples, for runs that do: a rollout engine, and the way of the actor's weights to it."""

    engine: Any
    weights: SharedWeights | RemoteWeights


@dataclass(kw_only=True)
class Roles:
    """The roles that run models, here or on workers, and what comes with them.

    module         the policy's own, under this library's attention while a trainer runs; None where workers hold it
    compute        what the actor trains on
    own_attention  the module's, as its owner knows it
    controller     of the workers; None where all is in this process
    groups         of the workers
    tracers        their profilers, where steps are traced
    """

    device: torch.device
    module: PreTrainedModel | None
    actor: TrainedRole
    critic: Critic | None
    reference: Reference | None
    sampler: Sampler | None
    shape: ModelShape
    compute: Compute
    own_attention: str = ""
    controller: Controller | None = None
    groups: list[WorkerGroup] = field(default_factory=list)
    tracers: list[WorkerGroup] = field(default_factory=list)

    @property
    def trainable(self) -> list[TrainedRole]:
        """Those with weights that a checkpoint holds: the actor, and the critic where there is one."""
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    def take_model(self) -> None:
        """Run the policy's module under this library's attention."""
        if self.module is not None:
            cast(Any, self.module).set_attn_implementation(ATTENTION)

    def give_model_back(self) -> None:
        """Leave the module as its owner knows it: ``generate`` and plain calls work again."""
        if self.module is not None:
            cast(Any, self.module).set_attn_implementation(self.own_attention)

    def close(self) -> None:
        """Give the model back; workers end."""
        self.give_model_back()
        if self.controller is not None:
            self.controller.close()

    def peak_memory_bytes(self) -> int:
        """Most memory of one process that runs models, since the last call where it's a GPU's; begins a new peak."""
        if self.groups:
            asked = [group.peak_memory_bytes() for group in self.groups]
            peaks: list[int] = [peak for handle in asked for peak in handle.get()]
            return max(peaks)
        peak = peak_memory_bytes(self.device)
        reset_peak_memory(self.device)
        return peak


class TrainingRows(Sized, Protocol):
    """A data set that a run trains on."""

    @property
    def fingerprint(self) -> str:
        """Hash of all its rows: a resumed run has the same one, or it isn't on the same data."""
        ...


@dataclass(kw_only=True)
class RunParts:
    """Everything that each loop uses.

    passes  roles that infer a column before the update, in order
    """

    roles: Roles
    algorithm: Algorithm[Any]
    passes: list[Any]
    tokenizer: PreTrainedTokenizerBase
    train: TrainingRows
    loader: Loader[Any]

    @property
    def trained(self) -> list[TrainedRole]:
        """Roles that learn, in the order that the algorithm declares."""
        return self._named(self.algorithm.trains)

    def trained_in(self, step: int) -> list[TrainedRole]:
        """Those of them that learn in ``step``."""
        return self._named(self.algorithm.trains_in(step))

    def close(self) -> None:
        """Give back what the run took."""
        self.roles.close()

    def _named(self, names: Sequence[str]) -> list[TrainedRole]:
        roles = {role.name: role for role in self.roles.trainable}
        return [roles[name] for name in names if name in roles]
