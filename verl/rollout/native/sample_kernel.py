"""Logits to tokens, log-probs and advanced rows on CUDA, in one pass over the logits and one small kernel.

Imported only where Triton is. The semantics are those of ``sampler.sample`` without truncation followed by
``advance.advance``; nothing is read from the host, so a step can be captured in a graph. Every thread keeps, for its
part of the vocabulary, the best noisy score and the sum of exponentials; the second kernel merges them. Shape letters:
B rows, V vocab, S stop ids, C chunks of the vocabulary.
Source: Gumbel-max, Maddison et al. 2014, arXiv:1411.0030; online log-sum-exp, Milakov and Gimelshein 2018,
arXiv:1805.02867.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from verl.rollout.native.advance import Outputs
from verl.rollout.native.row_state import RowState

BLOCK, WARPS = 1024, 4
"""Ids that a program takes at a time, 8 a thread: one 16-byte load of bfloat16."""
PROGRAMS, MAX_CHUNKS = 2048, 64
"""Programs to aim at, which fill the largest card; parts of one row's vocabulary at most."""
_LOG2_E, _LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
_LOWEST = tl.constexpr(-1.0e30)  # in place of -inf, which minus itself is NaN


def sample_step(
    logits: Tensor, rows: RowState, out: Outputs, *, scale: float = 1.0, softcap: float | None = None
) -> None:
    """Sample a token for every running row from logits [B, V] of any float type and advance the row.

    The logits are ``softcap * tanh(scale * logits / softcap)`` in float32. Ties go to the lower id. A row with a
    NaN has a NaN log-prob and some token of the vocabulary.
    """
    assert logits.stride(1) == 1, f"logits need a contiguous last dim, got strides {logits.stride()}"
    num_rows, vocab_size = logits.shape
    chunks = min(triton.cdiv(PROGRAMS, num_rows), triton.cdiv(vocab_size, BLOCK), MAX_CHUNKS)
    partial = torch.empty(3, num_rows, chunks, dtype=torch.float32, device=logits.device)
    best_ids = torch.empty(num_rows, chunks, dtype=torch.int32, device=logits.device)
    shape = (logits, logits.stride(0), vocab_size, float(scale), float(softcap or 1.0))
    stops = (rows.stop_ids, rows.stop_ids.stride(0))
    _scan_kernel[(num_rows, chunks)](
        *shape,
        rows.left,
        rows.index,
        rows.seed_low,
        rows.seed_high,
        rows.min_new,
        rows.temperature,
        *stops,
        partial,
        best_ids,
        num_stops=rows.stop_ids.shape[1],
        HAS_SOFTCAP=softcap is not None,
        FAST_LOG=logits.is_cuda,
        BLOCK=BLOCK,
        WIDTH=16 // logits.element_size(),
        num_warps=WARPS,
    )
    _merge_kernel[(num_rows,)](
        *shape,
        rows.temperature,
        partial,
        best_ids,
        *_row_arguments(rows, out),
        NUM_STOPS=rows.stop_ids.shape[1],
        STOPS_PAD=triton.next_power_of_2(max(1, rows.stop_ids.shape[1])),
        HAS_SOFTCAP=softcap is not None,
        CHUNKS=chunks,
        CHUNKS_PAD=triton.next_power_of_2(chunks),
        num_warps=1,
    )


def advance_step(tokens: Tensor, log_probs: Tensor, rows: RowState, out: Outputs) -> None:
    """``advance.advance`` in one kernel: for tokens [B] int64 with log-probs [B] float32 sampled by other means."""
    _advance_kernel[(tokens.shape[0],)](
        tokens,
        log_probs,
        *_row_arguments(rows, out),
        NUM_STOPS=rows.stop_ids.shape[1],
        STOPS_PAD=triton.next_power_of_2(max(1, rows.stop_ids.shape[1])),
        num_warps=1,
    )


def _row_arguments(rows: RowState, out: Outputs) -> tuple[Tensor | int, ...]:
    """What ``_advance`` takes after token and log-prob, in its order."""
    return (
        rows.tokens,
        rows.positions,
        rows.left,
        rows.index,
        rows.min_new,
        rows.stop_ids,
        rows.stop_ids.stride(0),
        out.tokens,
        out.tokens.stride(0),
        out.log_probs,
        out.log_probs.stride(0),
        out.count,
    )


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _scan_kernel(  # type: ignore[no-untyped-def]
    logit_ptr, logit_stride, vocab_size, scale, softcap, left_ptr, index_ptr, seed_low_ptr, seed_high_ptr, min_new_ptr,
    temperature_ptr, stop_ptr, stop_stride, partial_ptr, best_id_ptr, num_stops, HAS_SOFTCAP: tl.constexpr,
    FAST_LOG: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    index = tl.load(index_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    coldness = _coldness(temperature)
    noise_scale = tl.where(temperature == 0.0, 0.0, _LN_2)
    first, second = _row_hash(tl.load(seed_low_ptr + row), tl.load(seed_high_ptr + row), index)
    num_banned = tl.where(index < tl.load(min_new_ptr + row), num_stops, 0)
    size = tl.cdiv(tl.cdiv(vocab_size, BLOCK), tl.num_programs(1)) * BLOCK
    begin = chunk * size
    end = tl.where(tl.load(left_ptr + row) > 0, tl.minimum(begin + size, vocab_size), begin)  # nothing runs: no pass
    logit_row = logit_ptr + row.to(tl.int64) * logit_stride

    lane = tl.arange(0, BLOCK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    top = tl.full([BLOCK // WIDTH], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK // WIDTH], tl.float32)
    best = tl.full([BLOCK // WIDTH, WIDTH], float("-inf"), tl.float32)
    best_id = begin + lane
    for start in range(begin, end, BLOCK):
        ids = start + lane
        is_id = ids < vocab_size
        tempered = _tempered(tl.load(logit_row + ids, mask=is_id, other=0.0), scale, softcap, coldness, HAS_SOFTCAP)
        tempered = tl.where(is_id, tempered, float("-inf"))  # only here: a softcap would make -inf a number
        new_top = tl.maximum(top, tl.max(tempered, 1) * _LOG2_E)
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(tempered * _LOG2_E - new_top[:, None]), 1)
        top = new_top
        score = tempered - noise_scale * _log2(_exponential(ids, first, second, FAST_LOG), FAST_LOG)
        for i in range(num_banned):
            score = tl.where(ids == tl.load(stop_ptr + row * stop_stride + i), float("-inf"), score)
        is_better = score > best
        best = tl.where(is_better, score, best)
        best_id = tl.where(is_better, ids, best_id)

    row_top = tl.max(top, 0)
    row_best = tl.max(best)
    place = row * tl.num_programs(1) + chunk
    area = tl.num_programs(0) * tl.num_programs(1)
    tl.store(partial_ptr + place, row_best)
    tl.store(partial_ptr + area + place, row_top)
    tl.store(partial_ptr + 2 * area + place, tl.sum(total * tl.exp2(top - row_top), 0))
    tl.store(best_id_ptr + place, tl.min(tl.where(best == row_best, best_id, 0x7FFFFFFF)))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _merge_kernel(  # type: ignore[no-untyped-def]
    logit_ptr, logit_stride, vocab_size, scale, softcap, temperature_ptr, partial_ptr, best_id_ptr, token_ptr,
    position_ptr, left_ptr, index_ptr, min_new_ptr, stop_ptr, stop_stride, out_token_ptr, out_token_stride,
    out_log_prob_ptr, out_log_prob_stride, count_ptr, NUM_STOPS: tl.constexpr, STOPS_PAD: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS_PAD)
    is_real = chunk < CHUNKS
    place = row * CHUNKS + chunk
    area = tl.num_programs(0) * CHUNKS
    best = tl.load(partial_ptr + place, mask=is_real, other=float("-inf"))
    top = tl.load(partial_ptr + area + place, mask=is_real, other=_LOWEST)
    total = tl.load(partial_ptr + 2 * area + place, mask=is_real, other=0.0)
    ids = tl.load(best_id_ptr + place, mask=is_real, other=0x7FFFFFFF)
    token = tl.min(tl.where(best == tl.max(best, 0), ids, 0x7FFFFFFF), 0)
    token = tl.minimum(token, vocab_size - 1)
    row_top = tl.max(top, 0)
    log_total = (row_top + tl.log2(tl.sum(total * tl.exp2(top - row_top), 0))) * _LN_2
    logit = tl.load(logit_ptr + row.to(tl.int64) * logit_stride + token)
    coldness = _coldness(tl.load(temperature_ptr + row))
    _advance(
        row, token, _tempered(logit, scale, softcap, coldness, HAS_SOFTCAP) - log_total, token_ptr, position_ptr,
        left_ptr, index_ptr, min_new_ptr, stop_ptr, stop_stride, out_token_ptr, out_token_stride, out_log_prob_ptr,
        out_log_prob_stride, count_ptr, NUM_STOPS, STOPS_PAD,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _advance_kernel(  # type: ignore[no-untyped-def]
    sampled_ptr, log_prob_ptr, token_ptr, position_ptr, left_ptr, index_ptr, min_new_ptr, stop_ptr, stop_stride,
    out_token_ptr, out_token_stride, out_log_prob_ptr, out_log_prob_stride, count_ptr, NUM_STOPS: tl.constexpr,
    STOPS_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    _advance(
        row, tl.load(sampled_ptr + row).to(tl.int32), tl.load(log_prob_ptr + row), token_ptr, position_ptr, left_ptr,
        index_ptr, min_new_ptr, stop_ptr, stop_stride, out_token_ptr, out_token_stride, out_log_prob_ptr,
        out_log_prob_stride, count_ptr, NUM_STOPS, STOPS_PAD,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _advance(  # type: ignore[no-untyped-def]
    row, token, log_prob, token_ptr, position_ptr, left_ptr, index_ptr, min_new_ptr, stop_ptr, stop_stride,
    out_token_ptr, out_token_stride, out_log_prob_ptr, out_log_prob_stride, count_ptr, NUM_STOPS: tl.constexpr,
    STOPS_PAD: tl.constexpr,
):  # fmt: skip
    """``advance.advance`` for one row."""
    left = tl.load(left_ptr + row)
    is_running = left > 0
    count = tl.load(count_ptr).to(tl.int64)
    tl.store(out_token_ptr + count * out_token_stride + row, tl.where(is_running, token, -1))
    tl.store(out_log_prob_ptr + count * out_log_prob_stride + row, tl.where(is_running, log_prob, 0.0))
    index = tl.load(index_ptr + row) + 1
    i = tl.arange(0, STOPS_PAD)
    stop_ids = tl.load(stop_ptr + row * stop_stride + i, mask=i < NUM_STOPS, other=-1)
    is_stop = tl.max((stop_ids == token).to(tl.int32), 0) > 0
    left = tl.where(is_stop & (index >= tl.load(min_new_ptr + row)), 0, left - 1)
    position = tl.where(left > 0, tl.load(position_ptr + row) + 1, -1)
    tl.store(token_ptr + row, token, mask=is_running)
    tl.store(index_ptr + row, index, mask=is_running)
    tl.store(left_ptr + row, left, mask=is_running)
    tl.store(position_ptr + row, position, mask=is_running)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _coldness(temperature):  # type: ignore[no-untyped-def]
    """One over the temperature, 1 where the row is greedy."""
    return 1.0 / tl.where(temperature == 0.0, 1.0, temperature)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _tempered(logits, scale, softcap, coldness, HAS_SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    logits = logits.to(tl.float32)
    if HAS_SOFTCAP:
        capped = 2.0 * tl.sigmoid(logits * (2.0 * scale / softcap)) - 1.0  # tanh
        return capped * (softcap * coldness)
    else:
        return logits * (scale * coldness)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _row_hash(seed_low, seed_high, index):  # type: ignore[no-untyped-def]
    """The two keys of a row's noise, uint32, as ``sampler.gumbel`` has them."""
    following = (index + 1).to(tl.uint32, bitcast=True)
    first = _hash(seed_low.to(tl.uint32, bitcast=True) + following * 0x9E3779B9)
    return first, _hash(_hash(seed_high.to(tl.uint32, bitcast=True) ^ first) + following)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _hash(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _exponential(ids, first, second, FAST_LOG: tl.constexpr):  # type: ignore[no-untyped-def]
    """-log2(1 - u) of the uniform number u that ``sampler.gumbel`` draws for each id.

    Near 0 a polynomial, of relative error 1e-7: 1 - u in float32 has lost low bits there, and the fast logarithm errs
    by 1e-7 near 1. That the base is 2 moves the noise of all ids by the same amount.
    """
    bits = ids.to(tl.uint32, bitcast=True) * 0x9E3779B9 + first
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) ^ second
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    bits = (bits ^ (bits >> 16)) & 0x7FFFFFFF
    uniform = bits.to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-31 + 2.0**-32
    uniform = tl.minimum(uniform, 1 - 2.0**-24)
    series = uniform * 0.37924036 + 0.3501446
    series = series * uniform + 0.4813824
    series = series * uniform + 0.7213398
    series = series * uniform + 1.442695
    return tl.where(uniform < 0.125, series * uniform, -_log2(1.0 - uniform, FAST_LOG))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _log2(x, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of positive normal numbers; fast is one instruction, with an error of 1e-7 (relative, or absolute near 1)."""
    if FAST:
        return libdevice.fast_log2f(x)
    else:
        return tl.log2(x)
