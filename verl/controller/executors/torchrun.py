"""Workers that torchrun has started: rank 0 is the controller and the first worker, the other ranks serve it.

The ranks of one machine find each other through torchrun's own store. Which devices a pool names are the ranks.
"""

from __future__ import annotations

import itertools
import os
import secrets
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from verl.common.errors import ConfigError, WorkerError
from verl.common.guardian import signal_on_parent_death
from verl.controller.executors.base import Endpoint
from verl.controller.executors.channel import Channel
from verl.controller.executors.child import say_only_errors, serve
from verl.controller.executors.devices import local_devices
from verl.controller.executors.memory import store
from verl.controller.executors.processes import ChannelEndpoint
from verl.controller.executors.thread import ThreadEndpoint
from verl.controller.place import Rendezvous
from verl.controller.pool import ResourcePool
from verl.controller.rendezvous import leave, open_store
from verl.controller.results import Store

_START_S = 300.0
_CLOSE_S = 5.0
_runs = itertools.count()  # a program may use one controller after the other; every rank counts alike


@dataclass(frozen=True)
class _Launch:
    """What torchrun tells each of its processes."""

    rank: int
    world_size: int
    host: str
    port: int
    is_store_hosted: bool

    @staticmethod
    def read() -> _Launch:
        """Raises ConfigError outside of torchrun, or on more than one machine."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if name not in os.environ]
        if missing:
            raise ConfigError(
                f"the executor 'torchrun' needs what torchrun sets, but {', '.join(missing)} isn't set; start the "
                "program with torchrun, or use the executor 'processes'"
            )
        rank, world_size, local, port = (int(os.environ[n]) for n in (*names[:3], "MASTER_PORT"))
        if local != world_size:
            raise ConfigError(
                f"the executor 'torchrun' is for one machine, got {world_size} ranks of which {local} are here; the "
                "executor 'ray' is for several machines"
            )
        is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return _Launch(rank, world_size, os.environ["MASTER_ADDR"], port, is_hosted)

    def connect(self) -> Any:
        """The store of this launch; rank 0 hosts it where torchrun doesn't."""
        is_master = self.rank == 0 and not self.is_store_hosted
        return open_store(self.host, self.port, is_master, _START_S)


@dataclass(frozen=True)
class _Ranks:
    endpoints: Sequence[Endpoint]
    devices: list[str]
    rendezvous: Rendezvous | None


class Torchrun:
    """The controller's side, on rank 0. Pools that name the same rank share its process."""

    def __init__(self) -> None:
        self._launch = _Launch.read()
        if self._launch.rank:
            raise ConfigError(f"rank {self._launch.rank} of torchrun serves: start the program through controller.run")
        signal_on_parent_death(signal.SIGTERM, os.getppid())  # as torchrun passes it on, when it gets to that
        self._run = next(_runs)
        self._store = self._launch.connect()
        self._others = _accept(self._store, f"verl/controller/{self._run}", self._launch.world_size)
        self._own = ThreadEndpoint(store)
        self._pools = itertools.count()

    @staticmethod
    def serve() -> bool:
        launch = _Launch.read()
        if not launch.rank:
            return False
        key = f"verl/controller/{next(_runs)}"
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(launch.connect().get(key))
        channel = Channel(connection)
        channel.send(launch.rank)
        has_served = threading.Event()
        threading.Thread(target=_end_after, args=(connection.dup(), has_served), daemon=True).start()
        say_only_errors()
        with _signals_left_to_rank_0():
            serve(channel)
        has_served.set()
        return True

    @property
    def store(self) -> Store:
        return store

    def start(self, pool: ResourcePool) -> _Ranks:
        devices = local_devices(pool, "torchrun")
        if max(pool.devices) >= self._launch.world_size:
            raise ConfigError(
                f"devices: {list(pool.devices)} names rank {max(pool.devices)}, but torchrun started "
                f"{self._launch.world_size} processes; name others, or raise --nproc_per_node"
            )
        everyone: list[Endpoint] = [self._own, *self._others]
        prefix = f"verl/pool/{self._run}/{next(self._pools)}"
        rendezvous = Rendezvous(self._launch.host, self._launch.port, prefix) if pool.size > 1 else None
        return _Ranks([everyone[rank] for rank in pool.devices], devices, rendezvous)

    def close(self) -> None:
        for other in self._others:
            other.close()
        self._own.close()
        leave()


def _accept(store: Any, key: str, world_size: int) -> list[ChannelEndpoint]:
    """Channels to the ranks from 1 on. Raises WorkerError when one doesn't turn up in time."""
    found: dict[int, ChannelEndpoint] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        address = _free_address()
        listener.bind(address)
        listener.listen(world_size)
        store.set(key, address)
        until = time.monotonic() + _START_S
        while len(found) < world_size - 1:
            listener.settimeout(max(0.01, until - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                rank = min(set(range(1, world_size)) - set(found))
                raise WorkerError("torchrun", rank, f"didn't connect within {_START_S:g} s") from None
            if not _is_own(connection):
                connection.close()
                continue
            channel = Channel(connection)
            found[channel.receive(_START_S)] = ChannelEndpoint(channel)
    if not address.startswith("\0"):
        os.unlink(address)
    return [found[rank] for rank in range(1, world_size)]


def _free_address() -> str:
    """On Linux a name that exists only as long as its socket."""
    name = f"verl-{secrets.token_hex(16)}"
    return f"\0{name}" if sys.platform == "linux" else os.path.join(tempfile.gettempdir(), name)


def _is_own(connection: socket.socket) -> bool:
    """Whether the other side belongs to the same user: what it sends is unpickled."""
    if sys.platform != "linux":
        return True
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())


@contextmanager
def _signals_left_to_rank_0() -> Iterator[None]:
    """torchrun passes a signal on to all ranks; what becomes of it is the controller's to say, and it needs them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_after(connection: socket.socket, has_served: threading.Event) -> None:
    """End this process when the controller has been gone for a while and the worker still does something."""
    if sys.platform == "linux":
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)
        poll.poll()
        connection.close()
        if not has_served.wait(_CLOSE_S):
            os._exit(1)
