"""Messages between two processes of a machine over a socket, with the descriptors of the memory that they speak of.

Descriptors stand beside the pickle, so shared memory changes hands without being read.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
from typing import Any

from verl.controller.executors.memory import SharedMemory

_HEADER = struct.Struct("!QI")  # bytes of the pickle, number of descriptors
_FDS_AT_ONCE = 128  # the system passes 253 at most


class Channel:
    """One end of a connected Unix socket. Used by one thread; ``shut`` may come from any."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, message: object, timeout_s: float | None = None) -> None:
        """Send a message. Raises OSError when the other side is gone; TimeoutError when it doesn't read."""
        stream, pickler = io.BytesIO(), None
        pickler = _Pickler(stream)
        pickler.dump(message)
        body, fds = stream.getbuffer(), pickler.fds
        self._socket.settimeout(timeout_s)
        self._socket.sendall(_HEADER.pack(len(body), len(fds)))
        for start in range(0, len(fds), _FDS_AT_ONCE):
            socket.send_fds(self._socket, [b"\0"], fds[start : start + _FDS_AT_ONCE])
        self._socket.sendall(body)

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message. Raises EOFError or OSError when the other side is gone, TimeoutError when it is silent."""
        self._socket.settimeout(timeout_s)
        size, num_fds = _HEADER.unpack(self._exactly(_HEADER.size))
        fds: list[int] = []
        while len(fds) < num_fds:
            mark, more, _, _ = socket.recv_fds(self._socket, 1, min(_FDS_AT_ONCE, num_fds - len(fds)))
            if not mark:
                raise EOFError
            fds += more
        return _Unpickler(io.BytesIO(self._exactly(size)), fds).load()

    def shut(self) -> None:
        """Tell the other side that no more comes; whoever waits here is woken."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is shut already
            return

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            count = self._socket.recv_into(view[got:])
            if not count:
                raise EOFError
            got += count
        return data


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self.fds: list[int] = []
        self._alive: dict[int, int] = {}

    def persistent_id(self, obj: object) -> Any:
        if not isinstance(obj, SharedMemory):
            return None
        if obj.fd not in self._alive:
            self._alive[obj.fd] = len(self.fds)
            self.fds.append(obj.fd)
        return self._alive[obj.fd], obj.num_bytes


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, fds: list[int]) -> None:
        super().__init__(stream)
        self._fds = fds
        self._made: dict[int, SharedMemory] = {}

    def persistent_load(self, pid: Any) -> SharedMemory:
        number, num_bytes = pid
        if number not in self._made:
            self._made[number] = SharedMemory(self._fds[number], num_bytes)
        return self._made[number]
