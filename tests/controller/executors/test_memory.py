"""Values in nameless memory: small ones inline, large ones behind a descriptor, each reader with its own copy."""

from __future__ import annotations

import os

import pytest
import torch

from verl.controller.executors.memory import INLINE_BYTES, InlineBytes, SharedMemory, store


@pytest.mark.parametrize("size", [0, 1, INLINE_BYTES - 1000, INLINE_BYTES + 1, 5_000_000])
def test_round_trip(size: int) -> None:
    value = torch.arange(size, dtype=torch.int32).to(torch.uint8)
    stored = store(value)
    assert isinstance(stored.block, InlineBytes if size < INLINE_BYTES else SharedMemory)
    assert torch.equal(stored.load(), value)


def test_readers_do_not_see_each_others_writes() -> None:
    stored = store(torch.zeros(10_000))
    first = stored.load()
    first[0] = 1
    assert stored.load()[0] == 0


def test_a_tensor_outlives_what_it_was_read_from() -> None:
    tensor = store(torch.arange(10_000)).load()
    assert int(tensor.sum()) == 49_995_000


def test_many_pieces() -> None:
    tensors = [torch.full((100,), float(i)) for i in range(1500)]
    assert all(torch.equal(a, b) for a, b in zip(store(tensors).load(), tensors, strict=True))


def test_the_descriptor_is_closed_with_the_value() -> None:
    block = store(bytes(100_000)).block
    assert isinstance(block, SharedMemory)
    fd = block.fd
    os.fstat(fd)
    del block
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
