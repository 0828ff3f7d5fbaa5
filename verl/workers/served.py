"""The roles of a run as one rank of a worker group has them: what is called from the loop's process.

An engine's worker holds the role's part of the model and what its loss needs; the rollout's holds a rollout engine,
beside an actor or alone. Each takes and gives columns of rows that are its own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from verl.batch import Batch
from verl.common.background import Background
from verl.common.errors import StaleWeights
from verl.common.ranks import is_first_rank
from verl.common.seeding import seed_everything
from verl.controller import Place, broadcast, dispatch, gather, join, joint, split_first, split_rows
from verl.engines.base import TrainingEngine
from verl.engines.mesh import Mesh
from verl.engines.snapshot import Snapshot
from verl.models.causal_lm import CausalLM
from verl.observe.memory import peak_memory_bytes, reset_peak_memory
from verl.observe.metrics import MetricSums
from verl.rollout.base import Request, Response, RolloutStats
from verl.workers.recipe import Recipe
from verl.workers.reference import BaseReference, Reference
from verl.workers.trained import TrainedRole

Bucket = list[tuple[str, Tensor]]
"""Some whole weights by name."""


class EngineWorker:
    """The engine of ``role`` ("actor", "critic" or "reference") on one rank."""

    def __init__(self, place: Place, role: str, recipe: Recipe) -> None:
        self.device = _meet(place)
        seed_everything(recipe.seed)
        self.module = recipe.load(self.device)
        self.tokenizer = recipe.tokenizer
        self.algorithm = recipe.make_algorithm(self.module.dtype)
        self.role: TrainedRole | Reference = _MAKE[role](self, recipe)
        self._buckets: Iterator[Bucket] = iter(())
        self._snapshot: Snapshot | None = None
        self._writing = Background(f"verl-writes-{role}")

    @property
    def engine(self) -> TrainingEngine:
        """The role's engine, which learns."""
        assert isinstance(self.role.engine, TrainingEngine)
        return self.role.engine

    @dispatch(joint(split_rows))
    def infer(self, batch: Batch) -> Batch:
        """The role's column for these rows."""
        self.role.infer(batch)
        return batch.columns([self.role.writes])

    @dispatch(joint(split_rows))
    def infer_base(self, batch: Batch) -> Batch:
        """``ref_log_probs`` of these rows, by the model below the adapter."""
        reference = BaseReference(self.engine)
        reference.infer(batch)
        return batch.columns([reference.writes])

    @dispatch(joint(split_first))
    def update(self, batches: list[Batch], *, lr: float, entropy: bool, algorithm: Mapping[str, Any]) -> MetricSums:
        """One optimizer step over these rows, one batch of them, and those of the other ranks; ``algorithm`` is its
        state."""
        (batch,) = batches
        assert isinstance(self.role, TrainedRole)
        self.algorithm.load_state_dict(algorithm)
        return self.engine.update(batch, self.role.loss, lr=lr, entropy=entropy)

    @dispatch(joint(broadcast))
    def begin_weights(self, bucket_bytes: int) -> None:
        """Get ready to hand out all weights, whole, in buckets of about ``bucket_bytes``."""
        self._buckets = _buckets(self.engine.named_full_tensors(), bucket_bytes, is_kept=is_first_rank())

    @dispatch(joint(broadcast))
    def next_weights(self) -> Bucket:
        """The next bucket, on the CPU; empty behind the last one, and where nobody takes it: on ranks but the first."""
        return next(self._buckets, [])

    @dispatch(joint(broadcast))
    def take_snapshot(self, copied: bool) -> None:
        """Hold what a checkpoint needs of the role as it is now; ``copied`` so that it may learn on meanwhile."""
        self._snapshot = None  # never two
        self._snapshot = self.engine.snapshot(self.tokenizer, copied=copied)

    @dispatch(broadcast)
    def write_snapshot(self, folder: Path) -> None:
        """Begin to write it, together with the other ranks, and forget it."""
        assert self._snapshot is not None
        self._writing.start(partial(self._snapshot.write, folder))
        self._snapshot = None

    @dispatch(gather)
    def is_writing(self) -> bool:
        """Whether that hasn't ended yet, well or not."""
        return self._writing.is_running

    @dispatch(broadcast)
    def end_writing(self) -> None:
        """Raises what ended it."""
        self._writing.wait()

    @dispatch(joint(broadcast))
    def save_base(self, folder: Path) -> None:
        """Write the model below the adapter, together with the other ranks."""
        self.engine.save_base(folder)

    @dispatch(joint(broadcast))
    def restore(self, folder: Path) -> None:
        """Take up what was written there, on however many ranks."""
        self.engine.restore(folder)

    @dispatch(gather)
    def checkpoint_bytes(self) -> int:
        """What this rank's part of a checkpoint takes at least."""
        return self.engine.checkpoint_bytes()

    @dispatch(gather)
    def peak_memory_bytes(self) -> int:
        """Peak memory of this rank since the last call."""
        return _peak_memory_bytes(self.device)

    @dispatch(broadcast)
    def device_name(self) -> str:
        """ "cpu", or the name of the GPU."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"


class RolloutWorker:
    """A rollout engine on one rank.

    Beside an actor that has its whole model here, it samples from the very weights that learn. Otherwise it has a
    module of its own, refreshed from the actor's: by the ranks themselves where both are here, else through buckets.
    """

    def __init__(self, place: Place, recipe: Recipe) -> None:
        self.device = _meet(place)
        actor = place.colocated.get("actor")
        self._actor: EngineWorker | None = actor
        self._shares = actor is not None and actor.engine.mesh.device_mesh is None
        if self._shares:
            assert actor is not None
            lm = actor.engine.network.lm
        else:
            seed_everything(recipe.seed)
            lm = CausalLM(recipe.load(self.device))
        self.engine = recipe.make_rollout(lm)
        self._arriving: list[tuple[str, Tensor]] | None = None

    @dispatch(split_rows)
    def generate(self, requests: list[Request]) -> list[Response]:
        """One response a request, in order."""
        return self.engine.generate(requests)

    @dispatch(joint(broadcast))
    def refresh(self, version: int) -> None:
        """Take the weights of the actor beside it, as ``version``."""
        assert self._actor is not None
        if self._shares:
            self.engine.weights_changed(version)
        else:
            self.engine.load_weights(self._actor.engine.named_full_tensors(), version)

    @dispatch(broadcast)
    def take_weights(self, bucket: Bucket) -> None:
        """Some weights of a set that ``finish_weights`` ends."""
        self._arriving = [*(self._arriving or []), *bucket]

    @dispatch(broadcast)
    def finish_weights(self, version: int) -> None:
        """All weights of ``version`` have come. Raises StaleWeights, and samples no more, where some didn't."""
        if self._arriving is None:
            raise StaleWeights(f"no weights of version {version} have come")
        arrived, self._arriving = self._arriving, None
        self.engine.load_weights(arrived, version)

    @dispatch(gather)
    def stats(self) -> RolloutStats:
        """Counts of the last ``generate``."""
        return self.engine.stats

    @dispatch(gather)
    def version(self) -> int:
        """Which weights it samples from."""
        return self.engine.policy_version

    @dispatch(gather)
    def peak_memory_bytes(self) -> int:
        """Peak memory of this rank since the last call."""
        return _peak_memory_bytes(self.device)

    @dispatch(broadcast)
    def sleep(self) -> None:
        """Give the cache's memory back."""
        self.engine.sleep()

    @dispatch(broadcast)
    def wake(self) -> None:
        """Take it again."""
        self.engine.wake()


def _actor(worker: EngineWorker, recipe: Recipe) -> TrainedRole:
    mesh = Mesh.build(recipe.actor.parallel, worker.device.type)
    return recipe.make_actor(CausalLM(worker.module), worker.algorithm, worker.device, mesh)


def _critic(worker: EngineWorker, recipe: Recipe) -> TrainedRole:
    mesh = Mesh.build(recipe.critic.parallel, worker.device.type)
    return recipe.make_critic(worker.module, worker.algorithm, worker.device, mesh)


def _reference(worker: EngineWorker, recipe: Recipe) -> Reference:
    return recipe.make_reference(
        worker.module, worker.device, Mesh.build(recipe.reference.parallel, worker.device.type)
    )


_MAKE: dict[str, Callable[[EngineWorker, Recipe], TrainedRole | Reference]] = {
    "actor": _actor,
    "critic": _critic,
    "reference": _reference,
}


def _meet(place: Place) -> torch.device:
    """The worker's device; its pool's process group is there afterwards."""
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # a warning that concerns no user of ours
    disable_progress_bar()  # transformers' own bars would tear the run's
    device = torch.device(place.device)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.world_size))  # all ranks want the same cores
    if place.world_size > 1:
        join(place)
    return device


def _peak_memory_bytes(device: torch.device) -> int:
    peak = peak_memory_bytes(device)
    reset_peak_memory(device)
    return peak


def _buckets(tensors: Iterator[tuple[str, Tensor]], bucket_bytes: int, *, is_kept: bool) -> Iterator[Bucket]:
    """Tensors that all ranks make together, bucket by bucket in step; ranks that keep none give empty ones."""
    bucket: Bucket = []
    size = 0
    for name, tensor in tensors:
        if size and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        if is_kept:
            bucket.append((name, tensor.cpu()))
        size += tensor.nbytes
    if size:
        yield bucket
