"""Messages arrive whole, with the memory that they speak of."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from verl.controller.executors.channel import Channel
from verl.controller.executors.memory import SharedMemory, store
from verl.controller.results import Listed

Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = [Channel(end) for end in socket.socketpair()]
    yield ends[0], ends[1]
    for end in ends:
        end.close()


def test_large_messages_and_many_descriptors(pair: Pair) -> None:
    left, right = pair
    values = [store(bytes([i % 256]) * 20_000) for i in range(300)]
    sender = threading.Thread(target=left.send, args=((Listed((*values, values[0])), "x" * 1_000_000),))
    sender.start()
    listed, text = right.receive(30)
    sender.join()
    assert listed.load() == [*(bytes([i % 256]) * 20_000 for i in range(300)), bytes(20_000)] and len(text) == 1_000_000
    assert isinstance(listed.parts[0].block, SharedMemory) and listed.parts[0].block is listed.parts[300].block


def test_silence_and_the_end(pair: Pair) -> None:
    left, right = pair
    with pytest.raises(TimeoutError):
        right.receive(0.05)
    left.send("last")
    left.shut()
    left.shut()
    assert right.receive(5) == "last"
    with pytest.raises(EOFError):
        right.receive(5)
    with pytest.raises(OSError):
        right.send("x")
