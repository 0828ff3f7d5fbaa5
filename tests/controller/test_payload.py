"""What is packed comes back, whole or by column, without copies of what is raw."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.batches import sampled_batch
from verl.common.errors import MissingField
from verl.controller.payload import Reader, Section, pack, unpack


def packed(value: object) -> tuple[Any, Reader, list[Section]]:
    """Index, what reads the block, and a list of the sections that it was asked for."""
    index, pieces = pack(value)
    block, asked = memoryview(bytearray(b"".join(pieces))), []
    assert block.nbytes == index.num_bytes

    def read(section: Section) -> memoryview:
        asked.append(section)
        return block[section.start : section.stop]

    return index, read, asked


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).T,
        torch.zeros(0, 4),
        torch.tensor(1.5),
        torch.tensor([1.0, -2.0], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.ones(1).expand(5),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(3, requires_grad=True),
    ],
)
def test_tensors(tensor: torch.Tensor) -> None:
    index, read, _ = packed({"x": [tensor]})
    (got,) = unpack(index, read)["x"]
    assert got.dtype == tensor.dtype and got.shape == tensor.shape and torch.equal(got, tensor.detach())
    assert not got.requires_grad


@pytest.mark.parametrize("value", [None, 3, "text", [1, "a", None], {"a": 1}, {1: 2}, b"x" * 100])
def test_other_values(value: object) -> None:
    index, read, _ = packed(value)
    assert unpack(index, read) == value


def test_arrays_and_nested_tensors() -> None:
    jagged = torch.nested.nested_tensor_from_jagged(torch.arange(3.0), torch.tensor([0, 1, 3]))
    index, read, _ = packed([np.arange(5), jagged])
    array, nested = unpack(index, read)
    assert array.tolist() == [0, 1, 2, 3, 4] and nested.values().tolist() == [0, 1, 2]


def test_a_batch_by_column_reads_no_other() -> None:
    batch = sampled_batch([2, 3], [1, 4])
    index, read, asked = packed(batch)
    got = unpack(index, read, ["group_id", "response_ids"])
    assert got.names == ["group_id", "response_ids"] and got.rows == [{}, {}]
    assert torch.equal(got["response_ids"], batch["response_ids"]) and got.lengths("response_ids").tolist() == [1, 4]
    assert asked == [index.sections["group_id"], index.sections["response_ids"]]
    whole = unpack(index, read)
    assert whole.rows == batch.rows and all(torch.equal(whole[name], batch[name]) for name in batch.names)


def test_large_tensors_are_not_copied_into_the_pieces() -> None:
    tensor = torch.zeros(1000)
    _, pieces = pack(tensor)
    tensor[0] = 7.0
    assert any(np.frombuffer(piece, np.float32)[0] == 7.0 for piece in pieces if len(piece) == 4000)


def test_the_index_does_not_grow_with_the_tensors() -> None:
    small, large = (pack(torch.zeros(size))[0] for size in (10, 1_000_000))
    assert len(small.sections) == len(large.sections) == 1 and len(repr(large)) - len(repr(small)) < 40


@pytest.mark.parametrize("value, text", [({"loss": 1}, "did you mean 'loss'"), ([1], "of a result that has none")])
def test_columns_that_are_not_there(value: object, text: str) -> None:
    index, read, _ = packed(value)
    with pytest.raises(MissingField, match=text):
        unpack(index, read, ["los"])
