"""A head's output to log-probs, entropies and their gradient, each in one pass over the vocabulary.

Imported only where CUDA and Triton are, or under Triton's interpreter. Both compute in float32 from what the head gave,
in whatever type, and write nothing of the vocabulary's size but the gradient. Shape letters: M tokens, V vocab.
Source: online log-sum-exp, Milakov and Gimelshein 2018, arXiv:1805.02867, which here carries the entropy along.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_SCAN, _GRAD = 4096, 2048
"""Ids that a program takes at a time: it goes through a row, or writes a part of one."""


class Scale(NamedTuple):
    """From what the head gives to the logits of the softmax: ``softcap * tanh(scale * x / softcap) / temperature``."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0


def token_statistics(raw: Tensor, targets: Tensor, scale: Scale) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of each target, entropy and log-sum-exp of its distribution: [M] float32 each, in nats.

    raw      [M, V] what the head gave, of any float type
    targets  [M] int64
    """
    raw = raw.contiguous()
    log_probs, entropy, log_sum = (torch.empty(len(raw), dtype=torch.float32, device=raw.device) for _ in range(3))
    if len(raw):
        _statistics_kernel[(len(raw),)](
            raw,
            raw.shape[1],
            targets,
            log_probs,
            entropy,
            log_sum,
            scale.scale,
            scale.softcap or 1.0,
            1.0 / scale.temperature,
            HAS_SOFTCAP=scale.softcap is not None,
            BLOCK=_SCAN,
            num_warps=8,
        )
    return log_probs, entropy, log_sum


def head_gradient(
    raw: Tensor,
    targets: Tensor,
    entropy: Tensor,
    log_sum: Tensor,
    to_log_prob: Tensor | None,
    to_entropy: Tensor | None,
    scale: Scale,
) -> Tensor:
    """[M, V] gradient with respect to ``raw``, of its type, from those with respect to log-probs and entropies [M].

    None stands for no gradient. d log_prob / d x = onehot - p;  d entropy / d x = -p (log p + H).
    """
    raw = raw.contiguous()
    grad = torch.empty_like(raw)
    if raw.numel():
        none = torch.zeros_like(log_sum)
        _gradient_kernel[(len(raw), triton.cdiv(raw.shape[1], _GRAD))](
            raw,
            raw.shape[1],
            targets,
            entropy,
            log_sum,
            none if to_log_prob is None else to_log_prob.contiguous(),
            none if to_entropy is None else to_entropy.contiguous(),
            grad,
            scale.scale,
            scale.softcap or 1.0,
            1.0 / scale.temperature,
            HAS_SOFTCAP=scale.softcap is not None,
            HAS_ENTROPY=to_entropy is not None,
            BLOCK=_GRAD,
            num_warps=4,
        )
    return grad


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _tanh(x):  # type: ignore[no-untyped-def]
    small = tl.exp(-2.0 * tl.abs(x))  # never overflows
    return tl.where(x >= 0, 1.0, -1.0) * (1.0 - small) / (1.0 + small)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _logits(raw, scale, softcap, inverse_temperature, HAS_SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The logits of the softmax."""
    x = raw.to(tl.float32) * scale
    if HAS_SOFTCAP:
        x = softcap * _tanh(x / softcap)
    return x * inverse_temperature


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _statistics_kernel(  # type: ignore[no-untyped-def]
    raw_ptr,
    vocab_size,
    target_ptr,
    log_prob_ptr,
    entropy_ptr,
    log_sum_ptr,
    scale,
    softcap,
    inverse_temperature,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    raw_ptr += row.to(tl.int64) * vocab_size
    lane = tl.arange(0, BLOCK)
    top, total, weighted = -1.0e30, 0.0, 0.0  # largest logit x, sum of exp(x - top), and of exp(x - top) (x - top)
    for start in range(0, vocab_size, BLOCK):
        is_in = start + lane < vocab_size
        raw = tl.load(raw_ptr + start + lane, mask=is_in, other=0.0)
        x = _logits(raw, scale, softcap, inverse_temperature, HAS_SOFTCAP)
        higher = tl.maximum(top, tl.max(tl.where(is_in, x, -1.0e30), 0))
        shrunk = tl.exp(top - higher)
        above = x - higher
        part = tl.where(is_in, tl.exp(above), 0.0)
        weighted = (weighted + total * (top - higher)) * shrunk + tl.sum(part * tl.where(part == 0.0, 0.0, above), 0)
        total = total * shrunk + tl.sum(part, 0)
        top = higher
    log_total = tl.log(total)
    target = tl.load(target_ptr + row)
    chosen = _logits(tl.load(raw_ptr + target), scale, softcap, inverse_temperature, HAS_SOFTCAP)
    tl.store(log_prob_ptr + row, chosen - top - log_total)
    tl.store(entropy_ptr + row, log_total - weighted / total)
    tl.store(log_sum_ptr + row, top + log_total)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _gradient_kernel(  # type: ignore[no-untyped-def]
    raw_ptr,
    vocab_size,
    target_ptr,
    entropy_ptr,
    log_sum_ptr,
    to_log_prob_ptr,
    to_entropy_ptr,
    grad_ptr,
    scale,
    softcap,
    inverse_temperature,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    offset = row.to(tl.int64) * vocab_size
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = place < vocab_size
    raw = tl.load(raw_ptr + offset + place, mask=is_in, other=0.0)
    log_p = _logits(raw, scale, softcap, inverse_temperature, HAS_SOFTCAP) - tl.load(log_sum_ptr + row)
    p = tl.exp(log_p)
    grad = tl.load(to_log_prob_ptr + row) * (tl.where(place == tl.load(target_ptr + row), 1.0, 0.0) - p)
    if HAS_ENTROPY:
        grad -= tl.load(to_entropy_ptr + row) * p * (tl.where(p == 0.0, 0.0, log_p) + tl.load(entropy_ptr + row))
    grad *= scale * inverse_temperature
    if HAS_SOFTCAP:
        bent = _tanh(raw.to(tl.float32) * scale / softcap)
        grad *= 1.0 - bent * bent
    tl.store(grad_ptr + offset + place, grad.to(grad_ptr.dtype.element_ty), mask=is_in)
