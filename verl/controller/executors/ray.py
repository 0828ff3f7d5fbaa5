"""Workers as Ray actors, on the machines of a cluster. The only file that imports ray.

A pool is a placement group with one bundle a machine, so the workers of a machine stay together. Values lie in Ray's
object store, one object a column, and what crosses machines is only what is read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.common.errors import ConfigError, MissingExtra
from verl.controller.executors.base import WorkerLost
from verl.controller.executors.memory import INLINE_BYTES, InlineBytes
from verl.controller.payload import Reader, pack
from verl.controller.place import Rendezvous
from verl.controller.pool import ResourcePool
from verl.controller.rendezvous import LOOPBACK, host_store
from verl.controller.results import Store, Stored
from verl.controller.worker import Command, Reply, Worker

_PLACEMENT_S = 60.0


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise MissingExtra("ray", "ray", "the executor 'ray'") from None
    return ray


@dataclass(frozen=True)
class _Objects:
    """One object of Ray's store for each section, by where the section starts."""

    refs: Mapping[int, Any]

    def open(self) -> Reader:
        """Fetches a section when it is read; Ray's own copy can't be written to."""
        return lambda section: memoryview(bytearray(_ray().get(self.refs[section.start])))


def store(value: Any) -> Stored:
    """Put a value where every worker of the cluster can load it from."""
    import numpy as np

    index, pieces = pack(value)
    block = b"".join(pieces)
    if len(block) <= INLINE_BYTES:
        return Stored(index, InlineBytes(block))
    raw = np.frombuffer(block, dtype=np.uint8)
    refs = {section.start: _ray().put(raw[section.start : section.stop]) for section in index.sections.values()}
    return Stored(index, _Objects(refs))


class _Actor:
    """A worker, in an actor's process."""

    def __init__(self) -> None:
        self._worker = Worker(store)

    def run(self, command: Command) -> Reply:
        """Carry out a command."""
        return self._worker.run(command)


class RayEndpoint:
    """The controller's end of an actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def run(self, command: Command, timeout_s: float | None) -> Reply:
        ray = _ray()
        try:
            reply: Reply = ray.get(self._actor.run.remote(command), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            self.kill()
            raise WorkerLost(f"gave no answer within {timeout_s:g} s and was ended") from None
        except ray.exceptions.RayError as error:
            raise WorkerLost(f"is gone; Ray says:\n{error}") from None
        return reply

    def kill(self) -> None:
        _ray().kill(self._actor, no_restart=True)


@dataclass(frozen=True)
class _Actors:
    endpoints: Sequence[RayEndpoint]
    devices: list[str]
    rendezvous: Rendezvous | None


class Ray:
    """Actors on a cluster. Ray picks the devices: of a pool's ``devices`` only the number counts.

    address         of the cluster; None: one that is joined already, or a new one on this machine
    cpus_per_worker CPU cores that each worker is given
    """

    def __init__(self, address: str | None = None, cpus_per_worker: float = 1) -> None:
        ray = _ray()
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            ray.init(address=address, include_dashboard=False, configure_logging=False)
        self._cpus_per_worker = cpus_per_worker
        self._actors: list[RayEndpoint] = []
        self._groups: list[Any] = []
        self._stores: list[object] = []

    @staticmethod
    def serve() -> bool:
        return False

    @property
    def store(self) -> Store:
        return store

    def start(self, pool: ResourcePool) -> _Actors:
        ray = _ray()
        use_cuda = pool.kind != "cpu" and ray.cluster_resources().get("GPU", 0) >= pool.size
        if pool.kind == "cuda" and not use_cuda:
            raise ConfigError(
                f"devices: a pool of {pool.size} GPUs, but the cluster has {ray.cluster_resources().get('GPU', 0):g}; "
                "make the pool smaller, or set kind='cpu'"
            )
        group = self._place(pool, use_cuda)
        rendezvous = None
        if pool.size > 1:
            is_alone = sum(node["Alive"] for node in ray.nodes()) == 1
            hosted, rendezvous = host_store(LOOPBACK if is_alone else ray.util.get_node_ip_address())
            self._stores.append(hosted)
        actors = [self._start_actor(pool, group, rank, use_cuda) for rank in range(pool.size)]
        self._actors += actors
        return _Actors(actors, ["cuda:0" if use_cuda else "cpu"] * pool.size, rendezvous)

    def close(self) -> None:
        ray = _ray()
        if ray.is_initialized():
            for actor in self._actors:
                actor.kill()
            for group in self._groups:
                ray.util.remove_placement_group(group)
            if self._is_ours:
                ray.shutdown()
        self._actors.clear()
        self._groups.clear()
        self._stores.clear()

    def _place(self, pool: ResourcePool, use_cuda: bool) -> Any:
        """A placement group. Raises ConfigError when the cluster hasn't the room."""
        ray = _ray()
        bundle = {"CPU": self._cpus_per_worker * len(pool.devices)}
        if use_cuda:
            bundle["GPU"] = len(pool.devices)
        strategy = "STRICT_SPREAD" if pool.nodes > 1 else "PACK"
        group = ray.util.placement_group([bundle] * pool.nodes, strategy=strategy)
        self._groups.append(group)
        if not group.wait(_PLACEMENT_S):
            raise ConfigError(
                f"devices, nodes: the cluster has no room for {pool.nodes} x {bundle} within {_PLACEMENT_S:g} s; it "
                f"has {ray.available_resources()} free; make the pool smaller, or lower cpus_per_worker"
            )
        return group

    def _start_actor(self, pool: ResourcePool, group: Any, rank: int, use_cuda: bool) -> RayEndpoint:
        ray = _ray()
        where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=pool.node_of(rank)
        )
        own = {"RANK": rank, "LOCAL_RANK": pool.local_rank(rank), "WORLD_SIZE": pool.size}
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        options = {
            "num_cpus": self._cpus_per_worker,
            "num_gpus": int(use_cuda),
            "scheduling_strategy": where,
            "runtime_env": {"env_vars": {"PYTHONPATH": paths, **{name: str(number) for name, number in own.items()}}},
        }
        return RayEndpoint(ray.remote(_Actor).options(**options).remote())
