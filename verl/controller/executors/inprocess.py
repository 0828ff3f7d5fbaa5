"""One worker, in this process: a run that needs nothing but itself. Values are handed over as they are."""

from __future__ import annotations

from dataclasses import dataclass

from verl.common.errors import ConfigError
from verl.controller.executors.devices import local_devices
from verl.controller.executors.thread import ThreadEndpoint
from verl.controller.pool import ResourcePool
from verl.controller.rendezvous import leave
from verl.controller.results import Kept, Store


@dataclass(frozen=True)
class _OneWorker:
    endpoints: list[ThreadEndpoint]
    devices: list[str]
    rendezvous: None = None


class InProcess:
    """All pools are the same one worker, on a thread. A method must not change its arguments in place."""

    def __init__(self) -> None:
        self._endpoint = ThreadEndpoint(Kept)

    @staticmethod
    def serve() -> bool:
        return False

    @property
    def store(self) -> Store:
        return Kept

    def start(self, pool: ResourcePool) -> _OneWorker:
        if pool.size != 1:
            raise ConfigError(
                f"devices: the executor 'inprocess' is one worker, got a pool of {pool.size}; use a pool of 1, or the "
                "executor 'processes'"
            )
        return _OneWorker([self._endpoint], local_devices(pool, "inprocess"))

    def close(self) -> None:
        self._endpoint.close()
        leave()
