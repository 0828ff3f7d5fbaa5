"""A decode step's attention on CUDA in one kernel: rotary, append to the paged cache, attention over it.

Imported only where Triton is. One query a row; the query heads of a key head are in one program. Online softmax over
tiles of cached keys, in float32 and base 2; window, softcap and rotary are compiled in. The row's own key and value
come from registers and the cache is read only left of them, so programs need no order. A long context can be cut among
several programs, whose results a second kernel merges. Nothing is read from the host, so a graph can hold a call.

Shape letters: B rows, H query heads, K key/value heads, D and E head dims of keys and values, R rotary dims,
W blocks of a row.
Source: online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867; its pieces merged as in Flash-Decoding, Dao et
al. 2023; rotary, Su et al. 2021, arXiv:2104.09864, in halves and with the rounding of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.common.errors import VerlError


@dataclass(frozen=True)
class _Plan:
    """Bytes of a tile of keys and values, which set its tokens; warps of a program; stages of its pipeline."""

    tile_bytes: int
    warps: int
    stages: int


_WIDE = _Plan(32768, 4, 3)
_NARROW = _Plan(16384, 1, 4)
"""For many rows of half precision and heads of at most 128 dims: a warp alone waits for nobody. Measured 5 to 15%
faster on an H200 at 256 and 1,024 rows, slower where rows are few and long."""
MAX_SPLITS = 32
_ALIGNMENT = 16
_LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class CachePlace:
    """Where a layer's keys or values lie: an address that may change between replays of a graph.

    anchor  any tensor of the cache's type that lives as long as the graph, 16-byte aligned
    offset  [1] int64 on the device: elements from the anchor to the cache's first, a multiple of 16
    """

    anchor: Tensor
    offset: Tensor


def offset_from(anchor: Tensor, tensor: Tensor) -> int:
    """Elements from ``anchor`` to ``tensor``, for ``CachePlace.offset``. Raises VerlError if no multiple of 16."""
    num_bytes = tensor.data_ptr() - anchor.data_ptr()
    if num_bytes % (_ALIGNMENT * anchor.element_size()):
        raise VerlError(
            f"the cache lies {num_bytes} bytes from its anchor, which is no multiple of {_ALIGNMENT} elements of"
            f" {anchor.element_size()} bytes: both have to start where the allocator puts a tensor"
        )
    return num_bytes // anchor.element_size()


def splits_for(rows: int, kv_heads: int, num_sms: int) -> int:
    """Programs for each row and key head: a power of 2 that gives 1.5 to 3 programs an SM, as far as 32 can."""
    splits = 1
    while splits < MAX_SPLITS and 2 * splits * rows * kv_heads <= 3 * num_sms:
        splits *= 2
    return splits


def paged_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    keys: CachePlace,
    values: CachePlace,
    tables: Tensor,
    positions: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    block_size: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    splits: int,
) -> Tensor:
    """Append this step's token of each row to the cache and attend from it; returns [B, H, E] in the query's type.

    query [B, H, D], key [B, K, D], value [B, K, E]   any strides but in the last dim, which is contiguous
    keys, values       the layer's cache, contiguous [slots, K, D] and [slots, K, E]; slot = block * block_size + offset
    tables, positions  [B or more, W] and [B] int32: the rows' blocks and the token's position. Where it is -1 nothing
                       is written to the cache and the output is 0
    rotary             cos and sin [B, R], R <= D and even, to rotate query and key with; None: they are as they are
    scale, softcap     of the logits, softcap * tanh(scale * logits / softcap)
    window             positions that a row sees, its own counted; None: all
    splits             programs among which the tokens of a row are cut, a power of 2
    """
    rows, heads, key_dim = query.shape
    kv_heads, value_dim = value.shape[1:]
    assert query.stride(2) == key.stride(2) == value.stride(2) == tables.stride(1) == 1, "last dims are contiguous"
    out = query.new_empty(rows, heads, value_dim)
    partial, stats = out, out
    if splits > 1:
        partial = torch.empty(rows, heads, splits, value_dim, dtype=torch.float32, device=query.device)
        stats = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=query.device)
    cos, sin = (query, query) if rotary is None else rotary
    key_pad, value_pad = _pad(key_dim), _pad(value_dim)
    is_narrow = splits == 1 and query.element_size() == 2 and key_pad + value_pad <= 256
    plan = _NARROW if is_narrow else _WIDE
    _decode_kernel[(rows, kv_heads, splits)](
        query,
        key,
        value,
        cos,
        sin,
        keys.anchor,
        keys.offset,
        values.anchor,
        values.offset,
        partial,
        stats,
        tables,
        positions,
        float(scale),
        float(softcap or 1.0),
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        cos.stride(0),
        sin.stride(0),
        tables.stride(0),
        WINDOW=window or 0,
        HAS_SOFTCAP=softcap is not None,
        ROTARY_DIM=0 if rotary is None else cos.shape[1],
        KV_HEADS=kv_heads,
        GROUPS=heads // kv_heads,
        GROUPS_PAD=_pad(heads // kv_heads),
        D=key_dim,
        D_PAD=key_pad,
        E=value_dim,
        E_PAD=value_pad,
        BLOCK=block_size,
        TILE=_tile_tokens(plan.tile_bytes, (key_pad + value_pad) * query.element_size()),
        SPLITS=splits,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=plan.warps,
        num_stages=plan.stages,
        enable_fp_fusion=False,  # contracted, the products of rotary would lose a rounding that training makes
    )
    if splits > 1:
        _merge_kernel[(rows * heads,)](partial, stats, out, SPLITS=splits, E=value_dim, E_PAD=value_pad, num_warps=2)
    return out


def _tile_tokens(tile_bytes: int, bytes_per_token: int) -> int:
    """A power of 2 from 16 to 128: cached tokens that a program reads at a time."""
    fitting = max(16, min(128, tile_bytes // bytes_per_token))
    return fitting if fitting == triton.next_power_of_2(fitting) else int(triton.next_power_of_2(fitting)) // 2


def _pad(size: int) -> int:
    """The next size that a matrix product of Triton takes."""
    return max(16, int(triton.next_power_of_2(size)))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _decode_kernel(  # type: ignore[no-untyped-def]
    query_ptr, key_ptr, value_ptr, cos_ptr, sin_ptr,
    key_anchor_ptr, key_offset_ptr, value_anchor_ptr, value_offset_ptr,
    out_ptr, stat_ptr, table_ptr, position_ptr, scale, softcap,
    query_row_stride, query_head_stride, key_row_stride, key_head_stride, value_row_stride, value_head_stride,
    cos_stride, sin_stride, table_stride,
    WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, ROTARY_DIM: tl.constexpr, KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr,
    E_PAD: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    given_position = tl.load(position_ptr + row).to(tl.int32)
    position = tl.maximum(given_position, 0)
    owns_token = (given_position >= 0) & (split == 0)
    table_row = table_ptr + row * table_stride
    keys = key_anchor_ptr + tl.multiple_of(tl.load(key_offset_ptr), 16)
    values = value_anchor_ptr + tl.multiple_of(tl.load(value_offset_ptr), 16)

    group = tl.arange(0, GROUPS_PAD)
    d = tl.arange(0, D_PAD)
    e = tl.arange(0, E_PAD)
    is_rotary = d < ROTARY_DIM
    is_left = d < ROTARY_DIM // 2
    partner = tl.where(is_left, d + ROTARY_DIM // 2, d - ROTARY_DIM // 2)
    query_place = query_ptr + row * query_row_stride + (head * GROUPS + group)[:, None] * query_head_stride
    key_place = key_ptr + row * key_row_stride + head * key_head_stride
    query = tl.load(query_place + d[None, :], mask=(group < GROUPS)[:, None] & (d < D)[None, :], other=0.0)
    own_key = tl.load(key_place + d, mask=d < D, other=0.0)
    own_value = tl.load(value_ptr + row * value_row_stride + head * value_head_stride + e, mask=e < E, other=0.0)
    own_cell = _cell(table_row, position, head, BLOCK, KV_HEADS)
    if ROTARY_DIM > 0:
        cos = tl.load(cos_ptr + row * cos_stride + d, mask=is_rotary, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + row * sin_stride + d, mask=is_rotary, other=0.0).to(tl.float32)
        sin = tl.where(is_left, -sin, sin)
        is_turned = (group < GROUPS)[:, None] & is_rotary[None, :]
        query_partner = tl.load(query_place + partner[None, :], mask=is_turned, other=0.0)
        key_partner = tl.load(key_place + partner, mask=is_rotary, other=0.0)
        query = tl.where(is_rotary[None, :], _rotated(query, query_partner, cos[None, :], sin[None, :]), query)
        own_key = tl.where(is_rotary, _rotated(own_key, key_partner, cos, sin), own_key)

    best = tl.full([GROUPS_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUPS_PAD], tl.float32)
    out = tl.zeros([GROUPS_PAD, E_PAD], tl.float32)
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - (WINDOW - 1), 0)
    length = tl.cdiv(tl.cdiv(position - first, TILE), SPLITS) * TILE
    begin = first + split * length
    for start in range(begin, tl.minimum(begin + length, position), TILE):
        place = start + tl.arange(0, TILE)
        cached = tl.minimum(place, position - 1)  # right of the end the last key again: loads need no mask
        cell = _cell(table_row, cached, head, BLOCK, KV_HEADS)
        key = _tile(keys + cell[:, None] * D + d[None, :], d, D, D_PAD)
        logits = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        logits = _capped(logits, scale, softcap, HAS_SOFTCAP)
        logits = tl.where((place < position)[None, :], logits, float("-inf"))  # the first of a tile is always seen
        new_best = tl.maximum(best, tl.max(logits, 1))
        weights = tl.exp2(logits - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weights, 1)
        value = _tile(values + cell[:, None] * E + e[None, :], e, E, E_PAD)
        out = tl.dot(weights.to(value.dtype), value, out * shrink[:, None], input_precision=PRECISION)
        best = new_best

    # the own token comes last: its sums and stores don't hold up the first reads
    own_logit = tl.sum(query.to(tl.float32) * own_key.to(tl.float32)[None, :], 1)
    own_logit = tl.where(given_position >= 0, _capped(own_logit, scale, softcap, HAS_SOFTCAP), 0.0)
    best, total, out = _with_own_token(best, total, out, own_logit, own_value, owns_token)
    tl.store(keys + own_cell * D + d, own_key, mask=owns_token & (d < D))
    tl.store(values + own_cell * E + e, own_value, mask=owns_token & (e < E))

    query_head = (row * KV_HEADS + head) * GROUPS + group
    is_real = group < GROUPS
    if SPLITS == 1:
        out = out / tl.where(total == 0.0, 1.0, total)[:, None]  # 0 where the row is inactive
        place_out = query_head
    else:
        place_out = query_head * SPLITS + split
        tl.store(stat_ptr + place_out * 2, best, mask=is_real)
        tl.store(stat_ptr + place_out * 2 + 1, total, mask=is_real)
    tl.store(
        out_ptr + place_out[:, None] * E + e[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_real[:, None] & (e < E)[None, :],
    )


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _merge_kernel(  # type: ignore[no-untyped-def]
    partial_ptr, stat_ptr, out_ptr, SPLITS: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr
):
    """One program for each row and query head."""
    place = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    e = tl.arange(0, E_PAD)
    best = tl.load(stat_ptr + (place * SPLITS + split) * 2)
    total = tl.load(stat_ptr + (place * SPLITS + split) * 2 + 1)
    weights = tl.exp2(best - tl.max(best, 0))
    partial = tl.load(
        partial_ptr + (place * SPLITS + split)[:, None] * E + e[None, :], mask=(e < E)[None, :], other=0.0
    )
    total = tl.sum(weights * total, 0)
    out = tl.sum(weights[:, None] * partial, 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + place * E + e, out.to(out_ptr.dtype.element_ty), mask=e < E)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _cell(table_row, position, head, BLOCK: tl.constexpr, KV_HEADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which of the cache's vectors a position and head have, int64."""
    block = tl.load(table_row + position // BLOCK).to(tl.int64)
    return (block * BLOCK + position % BLOCK) * KV_HEADS + head


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _with_own_token(best, total, out, logit, value, is_counted):  # type: ignore[no-untyped-def]
    """One split counts it; all take its logit into account, so that none is left without a finite one."""
    new_best = tl.maximum(best, logit)
    weight = tl.where(is_counted, tl.exp2(logit - new_best), 0.0)
    shrink = tl.exp2(best - new_best)
    value = tl.where(is_counted, value.to(tl.float32), 0.0)
    return new_best, total * shrink + weight, out * shrink[:, None] + weight[:, None] * value[None, :]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _rotated(x, partner, cos, sin):  # type: ignore[no-untyped-def]
    """Float32 cos, and sin with the sign of the half; products and sum are each rounded to the type of ``x``."""
    straight = (x.to(tl.float32) * cos).to(x.dtype).to(tl.float32)
    crossed = (partner.to(tl.float32) * sin).to(x.dtype).to(tl.float32)
    return (straight + crossed).to(x.dtype)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _capped(products, scale, softcap, HAS_SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logits in units of ln 2."""
    if HAS_SOFTCAP:
        tanh = 2.0 * tl.sigmoid(products * (2.0 * scale / softcap)) - 1.0
        return tanh * (softcap * _LOG2_E)
    else:
        return products * (scale * _LOG2_E)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _tile(pointers, dim, DIM: tl.constexpr, PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    if DIM == PAD:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(dim < DIM)[None, :], other=0.0)
