"""Norm, gated activation and rotary embedding in one pass each, without gradients, rounded as transformers rounds.

Imported only where CUDA and Triton are, or under Triton's interpreter. Each reads its input once and writes once,
computes in float32, and takes slices of a wider matrix as they are. Grids depend on shapes alone, so that launches can
be captured in a graph. Shape letters: N tokens, C channels, F inner channels of an MLP, H query heads, K key heads,
D head dim, R rotated dims.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.common.errors import ShapeError

ACTIVATIONS = ("silu", "gelu_tanh")
_TILE = 2048
"""Elements a program aims at: 16 for each thread of 4 warps, two loads of 16 bytes in half precision."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, plus_one: bool, rounds_first: bool) -> Tensor:
    """``x`` over the root of the mean of its squares, times ``weight``.

    x             [..., C] float; the last dimension contiguous, the others anyhow
    weight        [C] of the type of x
    plus_one      multiply with 1 + weight
    rounds_first  round to the type of x before the multiplication too, not only after it
    Returns [..., C], contiguous, of the type of x.
    Raises ShapeError when the channels differ.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4.
    """
    channels = x.shape[-1]
    if weight.shape != (channels,):
        raise ShapeError(f"x has {channels} channels, the weight of its norm shape {list(weight.shape)}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = x.numel() // max(channels, 1)
    if not num_rows:
        return out
    x, inner_rows, outer_stride, inner_stride = _two_strides(x)
    width = triton.next_power_of_2(channels)
    rows = max(1, _TILE // width)
    _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        weight,
        out,
        num_rows,
        inner_rows,
        outer_stride,
        inner_stride,
        float(eps),
        C=channels,
        WIDTH=width,
        ROWS=rows,
        PLUS_ONE=plus_one,
        ROUNDS_FIRST=rounds_first,
        num_warps=4 if width <= 2048 else 8 if width <= 8192 else 16,
    )
    return out


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up``, rounded after the activation and after the product.

    gate, up    [N, F] float; the last dimension contiguous, so halves of one wider matrix go in as they are
    activation  one of ACTIVATIONS
    Returns [N, F], contiguous.
    Raises ShapeError when the shapes differ.
    Source: Shazeer 2020, arXiv:2002.05202, eq. 6.
    """
    if gate.shape != up.shape or gate.dim() != 2:
        raise ShapeError(f"gate and up are two matrices of one shape, got {list(gate.shape)} and {list(up.shape)}")
    assert activation in ACTIVATIONS
    gate, up = _last_contiguous(gate), _last_contiguous(up)
    num_rows, channels = gate.shape
    out = gate.new_empty(num_rows, channels)
    if not out.numel():
        return out
    block = min(_TILE // 2, triton.next_power_of_2(channels))
    _gated_kernel[(num_rows, triton.cdiv(channels, block))](
        gate,
        up,
        out,
        channels,
        gate.stride(0),
        up.stride(0),
        GELU=activation == "gelu_tanh",
        BLOCK=block,
        num_warps=4,
    )
    return out


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of halves: ``x * cos + (-second half, first half) * sin`` on the first R dims.

    query     [N, H, D], key [N, K, D] float; the last dimension contiguous, the others anyhow
    cos, sin  [N, R]; R is even and at most D, dims behind R pass through
    Each product is rounded to the type of query, then their sum; where cos is of a wider type, the sum alone.
    Returns query [N, H, D] and key [N, K, D], contiguous.
    Raises ShapeError when the shapes don't fit.
    Source: Su et al. 2021, arXiv:2104.09864, eq. 34, with dims i and i + R/2 paired instead of neighbours.
    """
    (num_tokens, heads, dim), (key_heads, rotated) = query.shape, (key.shape[1], cos.shape[-1])
    if (
        key.shape != (num_tokens, key_heads, dim)
        or not cos.shape == sin.shape == (num_tokens, rotated)
        or rotated % 2
        or rotated > dim
    ):
        raise ShapeError(
            "query [N, H, D], key [N, K, D], cos and sin [N, R] with even R <= D, got "
            f"{list(query.shape)}, {list(key.shape)}, {list(cos.shape)} and {list(sin.shape)}"
        )
    assert key.dtype == query.dtype and sin.dtype == cos.dtype
    query, key, cos, sin = (_last_contiguous(x) for x in (query, key, cos, sin))
    turned_query = query.new_empty(num_tokens, heads, dim)
    turned_key = key.new_empty(num_tokens, key_heads, dim)
    if not num_tokens:
        return turned_query, turned_key
    half, passed = rotated // 2, dim - rotated
    block = max(1, min(_TILE // triton.next_power_of_2(dim), triton.next_power_of_2(heads)))
    query_blocks = triton.cdiv(heads, block)
    _rotate_kernel[(num_tokens, query_blocks + triton.cdiv(key_heads, block))](
        query,
        key,
        cos,
        sin,
        turned_query,
        turned_key,
        heads,
        key_heads,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        cos.stride(0),
        sin.stride(0),
        QUERY_BLOCKS=query_blocks,
        HEADS=block,
        D=dim,
        HALF=half,
        HALF_PAD=triton.next_power_of_2(max(half, 1)),
        PASSED=passed,
        PASSED_PAD=triton.next_power_of_2(max(passed, 1)),
        ROUNDS=torch.promote_types(query.dtype, cos.dtype) == query.dtype,
        num_warps=4,
        enable_fp_fusion=False,  # a fused multiply-add would leave out the rounding of one product
    )
    return turned_query, turned_key


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _two_strides(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Rows of ``x`` as (outer, inner): it, the number of inner rows, the outer and the inner stride.

    Dimensions that lie behind one another count as one. ``x`` is copied only if more than two remain.
    """
    x = _last_contiguous(x)
    sizes, strides = [1], [0]
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if sizes[-1] == 1 or strides[-1] == size * stride:
            sizes[-1], strides[-1] = sizes[-1] * size, stride
        else:
            sizes.append(size)
            strides.append(stride)
    if len(sizes) > 2:
        return x.contiguous(), x.numel() // x.shape[-1], 0, x.shape[-1]
    return x, sizes[-1], strides[0] if len(sizes) == 2 else 0, strides[-1]


@triton.jit(do_not_specialize=["num_rows", "inner_rows"])  # type: ignore[untyped-decorator,unused-ignore]
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    inner_rows,
    outer_stride,
    inner_stride,
    eps,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    is_in = (row < num_rows)[:, None] & (column < C)[None, :]
    start = row // inner_rows * outer_stride + row % inner_rows * inner_stride
    x = tl.load(x_ptr + start[:, None] + column[None, :], mask=is_in, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < C, other=0.0).to(tl.float32)
    if PLUS_ONE:
        weight += 1.0
    x = x * tl.rsqrt(tl.sum(x * x, 1) / C + eps)[:, None]
    if ROUNDS_FIRST:
        x = x.to(out_ptr.dtype.element_ty).to(tl.float32)
        weight = weight.to(out_ptr.dtype.element_ty).to(tl.float32)
    out = x * weight[None, :]
    tl.store(out_ptr + row[:, None] * C + column[None, :], out.to(out_ptr.dtype.element_ty), mask=is_in)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _gated_kernel(  # type: ignore[no-untyped-def]
    gate_ptr,
    up_ptr,
    out_ptr,
    channels,
    gate_stride,
    up_stride,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < channels
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=is_in, other=0.0).to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)  # sqrt(2 / pi)
        active = gate * _sigmoid(2.0 * inner)  # sigmoid(2 x) = (1 + tanh(x)) / 2
    else:
        active = gate * _sigmoid(gate)
    active = active.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * channels + column, (active * up).to(out_ptr.dtype.element_ty), mask=is_in)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _sigmoid(x):  # type: ignore[no-untyped-def]
    small = tl.exp(-tl.abs(x))  # never overflows
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _rotate_kernel(  # type: ignore[no-untyped-def]
    query_ptr,
    key_ptr,
    cos_ptr,
    sin_ptr,
    turned_query_ptr,
    turned_key_ptr,
    heads,
    key_heads,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    cos_stride,
    sin_stride,
    QUERY_BLOCKS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    PASSED: tl.constexpr,
    PASSED_PAD: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cos_ptr += token * cos_stride
    sin_ptr += token * sin_stride
    if block < QUERY_BLOCKS:
        head = block * HEADS + tl.arange(0, HEADS)
        source = query_ptr + token * query_token_stride + head[:, None] * query_head_stride
        target = turned_query_ptr + (token * heads + head)[:, None] * D
        _turn(source, target, cos_ptr, sin_ptr, head < heads, HALF, HALF_PAD, PASSED, PASSED_PAD, ROUNDS)
    else:
        head = (block - QUERY_BLOCKS) * HEADS + tl.arange(0, HEADS)
        source = key_ptr + token * key_token_stride + head[:, None] * key_head_stride
        target = turned_key_ptr + (token * key_heads + head)[:, None] * D
        _turn(source, target, cos_ptr, sin_ptr, head < key_heads, HALF, HALF_PAD, PASSED, PASSED_PAD, ROUNDS)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _turn(  # type: ignore[no-untyped-def]
    source,
    target,
    cos_ptr,
    sin_ptr,
    is_head,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    PASSED: tl.constexpr,
    PASSED_PAD: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Some heads of one token: ``source`` and ``target`` [heads, 1] point at their first channels."""
    dtype = target.dtype.element_ty
    column = tl.arange(0, HALF_PAD)
    is_column = column < HALF
    is_in = is_head[:, None] & is_column[None, :]
    first = tl.load(source + column[None, :], mask=is_in, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + column[None, :], mask=is_in, other=0.0).to(tl.float32)
    first_cos = tl.load(cos_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    second_cos = tl.load(cos_ptr + HALF + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    first_sin = tl.load(sin_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    second_sin = tl.load(sin_ptr + HALF + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    first_kept, first_turned = first * first_cos, -second * first_sin
    second_kept, second_turned = second * second_cos, first * second_sin
    if ROUNDS:
        first_kept, first_turned = first_kept.to(dtype).to(tl.float32), first_turned.to(dtype).to(tl.float32)
        second_kept, second_turned = second_kept.to(dtype).to(tl.float32), second_turned.to(dtype).to(tl.float32)
    tl.store(target + column[None, :], (first_kept + first_turned).to(dtype), mask=is_in)
    tl.store(target + HALF + column[None, :], (second_kept + second_turned).to(dtype), mask=is_in)
    if PASSED:
        column = tl.arange(0, PASSED_PAD)
        is_in = is_head[:, None] & (column < PASSED)[None, :]
        passed = tl.load(source + 2 * HALF + column[None, :], mask=is_in, other=0.0)
        tl.store(target + 2 * HALF + column[None, :], passed, mask=is_in)
