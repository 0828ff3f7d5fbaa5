"""The devices of this machine that a pool asks for."""

from __future__ import annotations

from verl.common.errors import ConfigError
from verl.controller.pool import ResourcePool


def local_devices(pool: ResourcePool, executor: str) -> list[str]:
    """ "cpu" or "cuda:<index>" of each rank. Raises ConfigError for several machines, or devices that aren't here."""
    if pool.nodes > 1:
        raise ConfigError(
            f"nodes: the executor {executor!r} is for one machine, got a pool on {pool.nodes}; the executor 'ray' "
            "is for several"
        )
    if pool.kind == "cpu":
        return pool.device_names(0)
    import torch

    return pool.device_names(torch.cuda.device_count())
