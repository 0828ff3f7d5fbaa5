"""Decode attention over the paged cache on CUDA: one query a row, the query heads of a key head in one program.

Imported only where CUDA and Triton are. Online softmax over tiles of keys, in float32; sliding window and softcap
are compiled in. Shape letters: B rows, H query heads, K key/value heads, D and E head dims of keys and values.
Source: online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.rollout.native.cache import KVCache
from verl.rollout.native.decode_state import DecodeState
from verl.rollout.native.paged_attention import PagedAttention

_TILE = 64


class KernelAttention(PagedAttention):
    """Reads positions and tables of ``state`` on the device, so it can be captured in a graph."""

    def __init__(self, cache: KVCache, state: DecodeState) -> None:
        super().__init__(cache, state.slots(cache.block_size))
        self._state = state

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        state = self._state
        return paged_decode(
            query, keys, values, state.tables, state.positions, self.cache.block_size, scale, window, softcap
        )


def paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    positions: Tensor,
    block_size: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """query [B, H, D], keys [slots, K, D], values [slots, K, E], tables [B, W], positions [B]; returns [B, H, E].

    A row sees the keys at positions 0 to its own, those within ``window`` of it (itself counted) if one is given.
    """
    rows, heads, key_dim = query.shape
    kv_heads, value_dim = values.shape[1:]
    groups = heads // kv_heads
    query, out = query.contiguous(), query.new_empty(rows, heads, value_dim)
    _decode_kernel[(rows, kv_heads)](
        query,
        keys,
        values,
        out,
        tables,
        positions,
        float(scale),
        float(softcap or 1.0),
        tables.stride(0),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        WINDOW=window or 0,
        HAS_SOFTCAP=softcap is not None,
        GROUPS=groups,
        GROUPS_PAD=max(16, triton.next_power_of_2(groups)),
        D=key_dim,
        D_PAD=max(16, triton.next_power_of_2(key_dim)),
        E=value_dim,
        E_PAD=max(16, triton.next_power_of_2(value_dim)),
        BLOCK=block_size,
        TILE=_TILE if max(key_dim, value_dim) <= 128 else _TILE // 2,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=4,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _decode_kernel(  # type: ignore[no-untyped-def]
    query_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    table_ptr,
    position_ptr,
    scale,
    softcap,
    table_stride,
    key_slot_stride,
    key_head_stride,
    value_slot_stride,
    value_head_stride,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    length = (tl.load(position_ptr + row) + 1).to(tl.int32)
    group = tl.arange(0, GROUPS_PAD)
    d = tl.arange(0, D_PAD)
    e = tl.arange(0, E_PAD)
    query_head = (row * tl.num_programs(1) + head) * GROUPS + group
    query = tl.load(
        query_ptr + query_head[:, None] * D + d[None, :], mask=(group < GROUPS)[:, None] & (d < D)[None, :], other=0.0
    )
    best = tl.full([GROUPS_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUPS_PAD], tl.float32)
    out = tl.zeros([GROUPS_PAD, E_PAD], tl.float32)
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    for tile in range(first // TILE * TILE, length, TILE):  # the first tile holds a visible key: best is finite
        position = tile + tl.arange(0, TILE)
        is_visible = (position < length) & (position >= first)
        block = tl.load(table_ptr + row * table_stride + position // BLOCK, mask=is_visible, other=0)
        slot = block.to(tl.int64) * BLOCK + position % BLOCK
        key = tl.load(
            key_ptr + slot[:, None] * key_slot_stride + head * key_head_stride + d[None, :],
            mask=is_visible[:, None] & (d < D)[None, :],
            other=0.0,
        )
        logits = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        if HAS_SOFTCAP:
            logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)  # tanh
        logits = tl.where(is_visible[None, :], logits, float("-inf"))
        new_best = tl.maximum(best, tl.max(logits, 1))
        weights = tl.exp(logits - new_best[:, None])
        shrink = tl.exp(best - new_best)
        value = tl.load(
            value_ptr + slot[:, None] * value_slot_stride + head * value_head_stride + e[None, :],
            mask=is_visible[:, None] & (e < E)[None, :],
            other=0.0,
        )
        total = total * shrink + tl.sum(weights, 1)
        out = out * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        best = new_best
    out = out / total[:, None]
    tl.store(
        out_ptr + query_head[:, None] * E + e[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=(group < GROUPS)[:, None] & (e < E)[None, :],
    )
