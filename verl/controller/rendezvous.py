"""Where the workers of a pool meet to make a torch.distributed group: a store that the controller hosts.

The operating system picks the port, so that any number of runs share a machine.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

from verl.controller.place import Place, Rendezvous

LOOPBACK = "127.0.0.1"
_joined: list[Place] = []


def open_store(host: str, port: int, is_master: bool, timeout_s: float) -> Any:
    """A torch.distributed.TCPStore: its host when ``is_master`` (port 0: a free one), else a client of it."""
    import torch.distributed as dist

    limit = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, None, is_master, limit, wait_for_workers=False)  # type: ignore[attr-defined]


def host_store(host: str = LOOPBACK) -> tuple[Any, Rendezvous]:
    """A store on a free port, which lives as long as it is kept, and its address. ``host``: name of this machine."""
    store = open_store(host, 0, True, 300)
    return store, Rendezvous(host, store.port, "pool")


def join(place: Place, backend: str | None = None, *, timeout_s: float = 600) -> None:
    """Make the default torch.distributed group of all workers of ``place``'s pool; all of them must call it.

    A role calls it in its constructor; of roles that share a pool the first one does it, and for the others it is done.
    backend    "gloo", "nccl"; left out, what suits the device
    timeout_s  for a collective that another rank doesn't join
    """
    import torch.distributed as dist

    if dist.is_initialized():
        return
    store: Any
    if place.rendezvous is None:
        store = dist.HashStore()  # type: ignore[attr-defined]
    else:
        meeting = place.rendezvous
        if meeting.host == LOOPBACK and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the machine's own name may not resolve
        there = open_store(meeting.host, meeting.port, False, timeout_s)
        store = dist.PrefixStore(meeting.prefix, there)  # type: ignore[attr-defined]
    backend = backend or ("nccl" if place.device.startswith("cuda") else "gloo")
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=limit)
    _joined.append(place)


def leave() -> None:
    """End the group that ``join`` made in this process, if it did: some backends complain at exit otherwise."""
    while _joined:
        import torch.distributed as dist

        _joined.pop()
        if dist.is_initialized():
            dist.destroy_process_group()
