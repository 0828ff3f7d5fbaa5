"""Logits in, one token a row and its log-prob out.

A draw depends on the row's seed, the token's index in its response and the logits, on nothing else.

The noise of token v at index i of a row is a hash of (seed, i, v), computed with 32-bit integer operations that give
the same bits on every device: no generator state, nothing of the neighbours, and all of it fits in a CUDA graph.

Shape letters: B rows, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from verl.rollout.native.row_state import RowState
from verl.rollout.native.sequence import Sequence

_GOLDEN = -1640531527  # 0x9E3779B9 as int32
_MIX = (0x7FEB352D, -2073254261)  # multipliers of lowbias32 as int32; the second is 0x846CA68B
_INF = float("inf")


def sample(logits: Tensor, state: RowState, *, truncates: bool) -> tuple[Tensor, Tensor]:
    """float32 logits [B, V] of the rows in ``state``; returns tokens [B] int64 and log-probs [B] float32.

    A log-prob is of the tempered distribution (of the plain one where the temperature is 0) before bans and
    truncation. Ties of a greedy row go to the lower id on the CPU.

    truncates  whether any row has a top-k, top-p or min-p
    """
    is_greedy = state.temperature == 0
    tempered = logits / torch.where(is_greedy, 1.0, state.temperature)[:, None]
    scores = tempered
    if _may_hold(state.index < state.min_new):
        scores = _without_banned(scores, state)
    if truncates:
        scores = truncate(scores, state.top_k, state.top_p, state.min_p)
    if _may_hold(~is_greedy):
        noise = gumbel(state.seed_low, state.seed_high, state.index, logits.shape[1])
        scores = noise.masked_fill_(is_greedy[:, None], 0.0).add_(scores)
    tokens = scores.argmax(-1)
    return tokens, tempered.gather(1, tokens[:, None])[:, 0] - tempered.logsumexp(-1)


def gumbel(seed_low: Tensor, seed_high: Tensor, index: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [B, V] float32, a function of (seed, index, id) alone: [B] int32 each.

    31 random bits near 0 become an exponential by -log1p(-u), so that the tail that picks rare tokens is resolved to
    a probability of 2^-32. Largest value 22.2, smallest -2.9, never infinite.
    Source: integer hash lowbias32 (https://nullprogram.com/blog/2018/07/31/), with a second key between its rounds.
    """
    first = _hash(seed_low + (index + 1) * _GOLDEN)  # + 1: the hash of 0 is 0, which would favour an id for seed 0
    second = _hash(_hash(seed_high ^ first) + index + 1)
    bits = torch.arange(vocab_size, dtype=torch.int32, device=index.device) * _GOLDEN + first[:, None]
    bits ^= _shift(bits, 16)
    bits *= _MIX[0]
    bits ^= second[:, None]
    bits ^= _shift(bits, 15)
    bits *= _MIX[1]
    bits ^= _shift(bits, 16)
    uniform = (bits & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def truncate(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[B, V] log-scores with what top-k, then top-p of the rest, then min-p drop set to -inf; the settings are [B].

    Exactly k tokens survive a top-k, of equal ones the lower ids. Top-p keeps the token that reaches the mass.
    """
    vocab_size = scores.shape[1]
    values, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab_size, device=scores.device)
    keep = rank < torch.where(top_k > 0, top_k, vocab_size)[:, None]
    probs = values.masked_fill(~keep, -_INF).softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    keep &= mass_before < torch.where(top_p < 1, top_p, _INF)[:, None]
    keep &= probs >= min_p[:, None] * probs[:, :1]
    keep |= rank == 0
    return torch.empty_like(scores).scatter_(1, order, values.masked_fill(~keep, -_INF))


def truncates(rows: Rows[Sequence]) -> bool:
    """Whether any row has a top-k, top-p or min-p."""
    settings = {row.request.sampling for row in rows}
    return any(s.top_k > 0 or s.top_p < 1 or s.min_p > 0 for s in settings)


def _may_hold(condition: Tensor) -> bool:
    """Whether it holds for any row; True where the host would have to wait for the answer."""
    return condition.is_cuda or bool(condition.any())


def _without_banned(scores: Tensor, state: RowState) -> Tensor:
    """Stop ids of rows below their minimum length set to -inf; the padding of stop ids bans nothing."""
    is_banned = (state.stop_ids >= 0) & (state.index < state.min_new)[:, None]
    limit = torch.where(is_banned, -_INF, _INF)
    return scores.scatter_reduce(1, state.stop_ids.clamp(min=0).long(), limit, "amin")


def _hash(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 16)) * _MIX[0]
    x = (x ^ _shift(x, 15)) * _MIX[1]
    return x ^ _shift(x, 16)


def _shift(x: Tensor, by: int) -> Tensor:
    """Shift int32 right, filling with zeros."""
    return (x >> by) & ((1 << (32 - by)) - 1)
