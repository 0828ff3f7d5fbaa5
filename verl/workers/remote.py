"""Worker groups behind the protocols of the loop: engines, rollout engine and weights that live in other processes.

The loop calls them as if they were here. Rows go out as columns, only what a role writes comes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from verl.algorithms.base import Algorithm
from verl.batch import Batch
from verl.common.errors import ConfigError, StaleWeights
from verl.controller import WorkerGroup, whole
from verl.engines.packing import balanced_shards, in_batch_order, kept_together, rows_of, unit_lengths
from verl.observe.metrics import MetricSums
from verl.rollout.base import Request, Response, RolloutStats

BUCKET_BYTES = 1 << 28
"""Weights on their way at a time between pools."""
POLL_S = 0.1
"""Between two questions to workers whether they have written their part of a checkpoint."""


class RemoteEngine:
    """The engine of a role whose workers are ``group``: what Actor, Critic and Reference call.

    column  what the group's ``infer`` gives
    infer   the group's method; default: its ``infer``
    """

    def __init__(
        self,
        group: WorkerGroup,
        algorithm: Algorithm[Any],
        column: str,
        infer: Callable[[Batch], Any] | None = None,
    ) -> None:
        self.group, self._algorithm, self._column = group, algorithm, column
        self._infer: Callable[[Batch], Any] = infer or group.infer
        self.has_unsynced_update = False

    def infer(self, batch: Batch, output: str) -> Tensor:
        """As ``Engine.infer``: [N] float32 in the batch's order."""
        rows = [row for shard in self._shards(batch) for row in shard]
        found = self._infer(batch.columns().select(rows)).fetch(self._column)
        return in_batch_order(found[self._column], rows, batch)

    def update(
        self, batch: Batch, loss_function: Callable[..., Any], *, lr: float, entropy: bool = False
    ) -> MetricSums:
        """As ``TrainingEngine.update``; the workers have the role's loss themselves."""
        columns = batch.columns()
        rows = [columns.select(shard) for shard in self._shards(batch)]
        state = self._algorithm.state_dict()
        metrics: MetricSums = self.group.update(rows, lr=lr, entropy=entropy, algorithm=state).get()
        self.has_unsynced_update = True
        return metrics

    def snapshot(self, tokenizer: Any = None, *, copied: bool = True) -> RemoteSnapshot:
        """As ``TrainingEngine.snapshot``; the workers hold it, and have a tokenizer of their own."""
        self.group.take_snapshot(copied).get()
        return RemoteSnapshot(self.group)

    def restore(self, folder: Path) -> None:
        """As ``TrainingEngine.restore``."""
        self.group.restore(folder).get()

    def save_base(self, folder: Path) -> None:
        """As ``TrainingEngine.save_base``."""
        self.group.save_base(folder).get()

    def checkpoint_bytes(self) -> int:
        """As ``TrainingEngine.checkpoint_bytes``, of all ranks."""
        return sum(self.group.checkpoint_bytes().get())

    def _shards(self, batch: Batch) -> list[list[int]]:
        return work_shards(batch, self.group.grid.dp_size)


class RemoteSnapshot:
    """The snapshot that the workers of ``group`` took last."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def write(self, folder: Path) -> None:
        """As ``Snapshot.write``, between the calls that the loop makes to the same workers. May be on any thread."""
        self._group.write_snapshot(folder).get()
        while any(self._group.is_writing().get()):  # on all ranks: who removes a half must be alone in it
            time.sleep(POLL_S)
        self._group.end_writing().get()


class RemoteRollout:
    """A rollout engine of many: requests are spread over the ranks of ``group``."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self.policy_version = 0
        self.stats = RolloutStats()

    def generate(
        self, requests: Sequence[Request], *, should_pause: Callable[[], bool] | None = None
    ) -> list[Response]:
        """One response a request, in order. Raises ConfigError for a pause, which stops at the process border."""
        if should_pause is not None:
            raise ConfigError("should_pause can't be asked from other processes: only an engine of this process can")
        responses: list[Response] = self.group.generate(list(requests)).get()
        self.stats = summed(self.group.stats().get())
        return responses

    def sleep(self) -> None:
        """Give the caches' memory back."""
        self.group.sleep().get()

    def wake(self) -> None:
        """Take it again."""
        self.group.wake().get()


class RemoteWeights:
    """From the workers of the actor to those of the rollout, with a version that is checked.

    is_colocated  whether both are in the same processes: then each rank refreshes itself
    """

    def __init__(self, actor: RemoteEngine, rollout: RemoteRollout, *, is_colocated: bool) -> None:
        self._actor, self._rollout, self._is_colocated = actor, rollout, is_colocated

    @property
    def version(self) -> int:
        """How often the rollout's weights have been refreshed."""
        return self._rollout.policy_version

    def sync(self) -> None:
        """Publish the actor's updates, where there are any, to the rollout as the next version."""
        if self._actor.has_unsynced_update:
            self.set_version(self.version + 1)

    def set_version(self, version: int) -> None:
        """Publish the actor's weights as ``version``."""
        if self._is_colocated:
            self._rollout.group.refresh(version).get()
        else:
            self._send(version)
        self._rollout.policy_version = version
        self._actor.has_unsynced_update = False

    def check(self) -> None:
        """Raise StaleWeights when the actor was updated after the last sync, or a rank samples from other weights."""
        if self._actor.has_unsynced_update:
            raise StaleWeights(f"the actor was updated after version {self.version} was synced to the rollout")
        versions = self._rollout.group.version().get()
        if set(versions) != {self.version}:
            raise StaleWeights(f"the rollout's ranks are at versions {versions}, the actor's is {self.version}")

    def _send(self, version: int) -> None:
        """Bucket by bucket, from worker to worker."""
        self._actor.group.begin_weights(BUCKET_BYTES).get()
        while True:
            bucket = self._actor.group.next_weights()
            if not bucket.result().num_rows:
                break
            self._rollout.group.take_weights(whole(bucket))
        self._rollout.group.finish_weights(version).get()


def work_shards(batch: Batch, ranks: int) -> list[list[int]]:
    """The rows of each of ``ranks`` data-parallel ranks: near-equal work, what is compared on one rank, the larger
    shards first as an even cut of rows has them."""
    units = kept_together(batch)
    shards = rows_of(units, balanced_shards(unit_lengths(batch, units), ranks))
    return sorted(shards, key=len, reverse=True)


def summed(stats: Sequence[RolloutStats]) -> RolloutStats:
    """Counts of all ranks; seconds of the slowest."""
    extra: dict[str, float] = {}
    for one in stats:
        for name, value in one.extra.items():
            extra[name] = max(extra.get(name, 0.0), value) if name.endswith("_s") else extra.get(name, 0.0) + value
    return RolloutStats(
        prefill_tokens=sum(s.prefill_tokens for s in stats),
        cached_prompt_tokens=sum(s.cached_prompt_tokens for s in stats),
        decode_steps=max((s.decode_steps for s in stats), default=0),
        preemptions=sum(s.preemptions for s in stats),
        extra=extra,
    )
