"""What an executor provides: workers on the devices of a pool, and a place for what passes between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from verl.controller.place import Rendezvous
from verl.controller.pool import ResourcePool
from verl.controller.results import Store
from verl.controller.worker import Command, Reply


class WorkerLost(Exception):
    """A worker died or gave no answer in time; ``args[0]`` says how, with its last words."""


class Endpoint(Protocol):
    """The controller's end of one worker."""

    def run(self, command: Command, timeout_s: float | None) -> Reply:
        """Have a command carried out, and wait. From one thread at a time. Raises WorkerLost."""
        ...

    def kill(self) -> None:
        """End the worker, now, whatever it does; from any thread; ``run`` raises WorkerLost. May be called twice."""
        ...


class Workers(Protocol):
    """The workers of one pool.

    endpoints   one a rank; pools may share them
    devices     "cpu" or "cuda:<index>" of each rank
    rendezvous  where they meet; None with one worker
    """

    endpoints: Sequence[Endpoint]
    devices: Sequence[str]
    rendezvous: Rendezvous | None


class Executor(Protocol):
    """Starts workers, keeps what passes between them, and leaves nothing behind."""

    @staticmethod
    def serve() -> bool:
        """In a process that is a worker and not the controller: be one until the controller is closed, then True."""
        ...

    @property
    def store(self) -> Store:
        """Puts a value of the controller where workers can load it from."""
        ...

    def start(self, pool: ResourcePool) -> Workers:
        """Workers on the pool's devices. Raises ConfigError for a pool that can't be had."""
        ...

    def close(self) -> None:
        """End every worker: idle ones are asked to, and killed when they don't. May be called twice."""
        ...
