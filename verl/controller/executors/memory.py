"""Packed values in memory that processes of this machine share.

The memory has no name: it lives as long as some process holds a descriptor of it, so nothing can be left behind,
however processes end. Small values travel in the message itself.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import weakref
from dataclasses import dataclass
from typing import Any

from verl.controller.payload import Reader, pack
from verl.controller.results import Stored

INLINE_BYTES = 16 * 1024
"""Up to this size a copy in each message costs less than a descriptor."""
_MAX_PIECES = 512  # of one writev; the system's limit is 1024


@dataclass(frozen=True)
class InlineBytes:
    """Bytes that travel with their description."""

    data: bytes

    def open(self) -> Reader:
        """A copy of one's own."""
        data = memoryview(bytearray(self.data))
        return lambda section: data[section.start : section.stop]


class SharedMemory:
    """Bytes behind a descriptor, which is closed with this object.

    Travels only through a ``Channel``, which hands on the descriptor.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd, self.num_bytes = fd, num_bytes
        weakref.finalize(self, os.close, fd)

    def open(self) -> Reader:
        """The memory itself, each page copied when it is first written to."""
        data = memoryview(mmap.mmap(self.fd, self.num_bytes, access=mmap.ACCESS_COPY))
        return lambda section: data[section.start : section.stop]


def store(value: Any) -> Stored:
    """Put a value where every process of this machine that is given it can read it."""
    index, pieces = pack(value)
    if index.num_bytes <= INLINE_BYTES:
        return Stored(index, InlineBytes(b"".join(pieces)))
    memory = SharedMemory(_nameless_file(), index.num_bytes)
    _write(memory.fd, pieces)
    return Stored(index, memory)


def _nameless_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("verl")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(fd: int, pieces: list[bytes | memoryview]) -> None:
    left = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
    while left:
        written = os.writev(fd, left[:_MAX_PIECES])  # may stop short: one call writes 2 GiB at most
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if written:
            left[0] = left[0][written:]
