"""The decode kernel against attention written out row by row in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.rollout.native.kernels import DEVICE
from verl.common.errors import VerlError
from verl.rollout.native.decode_kernel import CachePlace, offset_from, paged_decode, splits_for

SHAPES = [  # query heads, key heads, dims of keys and values, rotary dims, block size
    (4, 2, 16, 16, 16, 4),
    (6, 1, 24, 20, 8, 16),
    (3, 3, 32, 16, 0, 1),
    (20, 1, 80, 80, 32, 8),
]
HALVES = [(torch.float16, 3e-3), (torch.bfloat16, 0.02)][: 2 if DEVICE.type == "cuda" else 1]
"""The interpreter multiplies matrices of bfloat16 as if they were integers."""


@dataclass
class Case:
    """A layer's cache of rows whose blocks lie in random order, and a step's query, key and value of each row."""

    query: Tensor
    key: Tensor
    value: Tensor
    rotary: tuple[Tensor, Tensor] | None
    keys: Tensor
    values: Tensor
    anchor: Tensor
    tables: Tensor
    positions: Tensor
    size: int

    def decode(self, window: int | None = None, softcap: float | None = None, splits: int = 1) -> Tensor:
        places = [
            CachePlace(self.anchor, torch.tensor([offset_from(self.anchor, t)], device=DEVICE))
            for t in (self.keys, self.values)
        ]
        return paged_decode(
            self.query, self.key, self.value, keys=places[0], values=places[1], tables=self.tables,
            positions=self.positions, rotary=self.rotary, block_size=self.size, scale=0.2, window=window,
            softcap=softcap, splits=splits,
        )  # fmt: skip

    def slot(self, row: int, position: int) -> int:
        return int(self.tables[row, position // self.size]) * self.size + position % self.size


def case(
    positions: list[int], shape: tuple[int, int, int, int, int, int] = SHAPES[0], dtype: torch.dtype = torch.float32
) -> Case:
    heads, kv_heads, key_dim, value_dim, rotary_dim, size = shape
    torch.manual_seed(0)
    rows, width = len(positions), max(positions) // size + 1
    tables = (torch.randperm(rows * width) + 1).reshape(rows, width).int()
    slots = (rows * width + 1) * size
    sizes = [16, slots * kv_heads * key_dim, slots * kv_heads * value_dim]
    sizes = [-(-n // 16) * 16 for n in sizes]
    anchor, keys, values = torch.randn(sum(sizes)).to(DEVICE, dtype).split(sizes)
    wide = torch.randn(rows, heads * key_dim + kv_heads * (key_dim + value_dim)).to(DEVICE, dtype)
    query, key, value = wide.split([heads * key_dim, kv_heads * key_dim, kv_heads * value_dim], dim=1)
    rotary = (torch.randn(rows, rotary_dim).to(DEVICE, dtype), torch.randn(rows, rotary_dim).to(DEVICE, dtype))
    return Case(
        query.unflatten(1, (heads, key_dim)),
        key.unflatten(1, (kv_heads, key_dim)),
        value.unflatten(1, (kv_heads, value_dim)),
        rotary if rotary_dim else None,
        keys[: slots * kv_heads * key_dim].view(slots, kv_heads, key_dim),
        values[: slots * kv_heads * value_dim].view(slots, kv_heads, value_dim),
        anchor,
        tables.to(DEVICE),
        torch.tensor(positions, dtype=torch.int32, device=DEVICE),
        size,
    )


def rotated(x: Tensor, row: int, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """[heads, D] of one row, as transformers rotates it."""
    if rotary is None:
        return x
    cos, sin = rotary[0][row], rotary[1][row]
    turned, rest = x.split([len(cos), x.shape[1] - len(cos)], dim=1)
    left, right = turned.chunk(2, dim=1)
    return torch.cat([turned * cos + torch.cat([-right, left], dim=1) * sin, rest], dim=1)


def expected(c: Case, window: int | None = None, softcap: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Output, and the cache's keys and values after the step."""
    keys, values = c.keys.clone(), c.values.clone()
    out = torch.zeros(*c.query.shape[:2], c.value.shape[2], device=DEVICE)
    groups = c.query.shape[1] // c.key.shape[1]
    for row, position in enumerate(c.positions.tolist()):
        if position < 0:
            continue
        keys[c.slot(row, position)] = rotated(c.key[row], row, c.rotary)
        values[c.slot(row, position)] = c.value[row]
        first = 0 if window is None else max(0, position - window + 1)
        slots = [c.slot(row, p) for p in range(first, position + 1)]
        query = rotated(c.query[row], row, c.rotary).double()
        for head in range(len(query)):
            logits = keys[slots, head // groups].double() @ query[head] * 0.2
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            out[row, head] = (logits.softmax(0) @ values[slots, head // groups].double()).float()
    return out, keys, values


def check(c: Case, window: int | None = None, softcap: float | None = None, splits: int = 1, tol: float = 1e-5) -> None:
    out, keys, values = expected(c, window, softcap)
    got = c.decode(window, softcap, splits)
    assert got.dtype == c.query.dtype and got.shape == out.shape
    torch.testing.assert_close(got.float(), out, atol=tol, rtol=0)
    torch.testing.assert_close(c.keys.float(), keys.float(), atol=1e-6 if tol < 1e-4 else 0, rtol=0)
    torch.testing.assert_close(c.values, values, atol=0, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("splits", [1, 4])
def test_rows_of_many_lengths_attend_and_append(shape: tuple[int, int, int, int, int, int], splits: int) -> None:
    check(case([0, 1, 15, 16, -1, 140], shape), splits=splits)


@pytest.mark.parametrize("window", [1, 16, 70, 1000])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("splits", [1, 2])
def test_window_and_softcap(window: int, softcap: float | None, splits: int) -> None:
    check(case([0, 3, 70, 150]), window, softcap, splits)


@pytest.mark.parametrize(("dtype", "tolerance"), HALVES)
@pytest.mark.parametrize("splits", [1, 2])
def test_half_precision_rounds_as_transformers_does(dtype: torch.dtype, tolerance: float, splits: int) -> None:
    check(case([7, 40], (4, 2, 32, 32, 24, 4), dtype), splits=splits, tol=tolerance)


def test_large_logits_neither_overflow_nor_vanish() -> None:
    c = case([40, 40])
    c.query.mul_(1000.0)
    check(c, splits=2, tol=1e-3)


@pytest.mark.parametrize("splits", [1, 2])
def test_inactive_rows_are_zero_whatever_they_hold(splits: int) -> None:
    c = case([-1, 5, -1])
    c.query[0], c.key[0], c.value[0] = math.nan, math.nan, math.nan
    c.tables[0] = 0
    before = c.keys.clone()
    assert c.decode(splits=splits)[[0, 2]].eq(0).all()
    assert (c.keys != before).any(dim=2).any(dim=1).nonzero()[:, 0].tolist() == [c.slot(1, 5)]


def test_what_lies_right_of_the_position_or_left_of_the_window_is_not_read() -> None:
    c = case([37], (4, 2, 16, 16, 16, 4))
    seen = [c.slot(0, position) for position in range(30, 37)]
    for cache in (c.keys, c.values):
        hidden = torch.full_like(cache, math.nan)
        hidden[seen] = cache[seen]
        cache.copy_(hidden)
    c.tables = torch.cat([c.tables, torch.full_like(c.tables, 10**6)], dim=1)
    assert c.decode(window=8).isfinite().all()


def test_tables_may_have_more_rows_and_a_wider_stride() -> None:
    c = case([9, 20])
    out = c.decode()
    wide = torch.zeros(5, 40, dtype=torch.int32, device=DEVICE)
    wide[:2, : c.tables.shape[1]] = c.tables
    c.tables = wide[:, :30]
    torch.testing.assert_close(c.decode(), out, atol=0, rtol=0)


def test_the_cache_may_move_between_calls() -> None:
    c = case([21, 6])
    size = c.keys.numel()
    storage = torch.zeros(16 + 2 * size, device=DEVICE)
    anchor, first, second = storage.split([16, size, size])
    first.copy_(c.keys.flatten())
    second.copy_(2 * c.keys.flatten())
    offset = torch.tensor([offset_from(anchor, first)], device=DEVICE)
    c.anchor, kept = anchor, (c.keys, c.values)
    outs = []
    for keys in (first, second):
        offset.copy_(torch.tensor([offset_from(anchor, keys)]))
        c.keys, c.values = keys.view_as(kept[0]), keys.view_as(kept[0])
        outs.append((c.decode(), expected(c)[0]))
    for got, want in outs:
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert not torch.allclose(outs[0][0], outs[1][0])


def test_offset_is_counted_in_elements_and_must_be_aligned() -> None:
    storage = torch.zeros(64, dtype=torch.bfloat16)
    assert offset_from(storage[:16], storage[48:]) == 48
    assert offset_from(storage[32:], storage[:16]) == -32
    with pytest.raises(VerlError, match="no multiple of 16 elements"):
        offset_from(storage[:16], storage[24:])


@pytest.mark.parametrize(
    ("rows", "kv_heads", "splits"),
    [(256, 2, 1), (128, 2, 1), (99, 2, 2), (64, 2, 2), (32, 2, 4), (1, 2, 32), (1, 1, 32)],
)
def test_splits_fill_the_card(rows: int, kv_heads: int, splits: int) -> None:
    assert splits_for(rows, kv_heads, num_sms=132) == splits
