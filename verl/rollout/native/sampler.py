"""Logits in, one token a row and its log-prob out.

A draw depends on the row's seed, the token's index in its response and the logits, on nothing else.

The noise of token v at index i of a row is a hash of (seed, i, v), computed with 32-bit integer operations that give
the same bits on every device: no generator state, nothing of the neighbours, and all of it fits in a CUDA graph.

Shape letters: B rows, V vocab, S stop ids of a row.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from verl.rollout.native.sequence import Sequence

_GOLDEN = -1640531527  # 0x9E3779B9 as int32
_MIX = (0x7FEB352D, -2073254261)  # multipliers of lowbias32 as int32; the second is 0x846CA68B
_INF = float("inf")


@dataclass
class SamplingState:
    """Sampling settings of B rows as tensors.

    seed_low, seed_high  [B] int32  halves of the row's seed
    index                [B] int32  which token of its response the row samples next
    temperature          [B] float32, 0 is greedy
    top_k                [B] int64, 0 keeps all
    top_p, min_p         [B] float32
    min_new              [B] int32  index before which ``banned`` ids can't be sampled; 0 for a row without any
    banned               [B, S] int64, padded with an id of the row; S is 0 when no row has such a minimum to reach
    truncates, draws     whether any row has a top-k, top-p or min-p; whether any row isn't greedy
    """

    seed_low: Tensor
    seed_high: Tensor
    index: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    min_new: Tensor
    banned: Tensor
    truncates: bool
    draws: bool

    @property
    def tensors(self) -> list[Tensor]:
        """All columns, in one order."""
        return [value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)]

    @staticmethod
    def of(rows: Rows[Sequence], vocab_size: int, device: torch.device) -> SamplingState:
        """The settings of ``rows``, whose next tokens are to be sampled."""
        seeds = [row.request.seed & 0xFFFFFFFFFFFFFFFF for row in rows]
        settings = [row.request.sampling for row in rows]
        draws = any(s.temperature > 0 for s in settings)
        truncates = any(s.top_k > 0 or s.top_p < 1 or s.min_p > 0 for s in settings)
        min_new, banned = _bans(rows, vocab_size)

        def column(values: list[int] | list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device)

        return SamplingState(
            seed_low=column([_signed(seed & 0xFFFFFFFF) for seed in seeds], torch.int32),
            seed_high=column([_signed(seed >> 32) for seed in seeds], torch.int32),
            index=column([row.num_response for row in rows], torch.int32),
            temperature=column([s.temperature for s in settings], torch.float32),
            top_k=column([s.top_k for s in settings], torch.int64),
            top_p=column([s.top_p for s in settings], torch.float32),
            min_p=column([s.min_p for s in settings], torch.float32),
            min_new=column(min_new, torch.int32),
            banned=torch.tensor(banned, dtype=torch.int64).reshape(len(rows), -1).to(device),
            truncates=truncates,
            draws=draws,
        )


def sample(logits: Tensor, state: SamplingState) -> tuple[Tensor, Tensor]:
    """float32 logits [B, V]; returns tokens [B] int64 and log-probs [B] float32.

    A log-prob is of the tempered distribution (of the plain one where the temperature is 0) before bans and
    truncation. Ties of a greedy row go to the lower id on the CPU.
    """
    is_greedy = state.temperature == 0
    tempered = logits / torch.where(is_greedy, 1.0, state.temperature)[:, None]
    scores = tempered
    if state.banned.shape[1]:
        scores = _without_banned(scores, state)
    if state.truncates:
        scores = truncate(scores, state.top_k, state.top_p, state.min_p)
    if state.draws:
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


def _without_banned(scores: Tensor, state: SamplingState) -> Tensor:
    is_active = (state.index < state.min_new)[:, None]
    return scores.scatter(1, state.banned, scores.gather(1, state.banned).masked_fill(is_active, -_INF))


def _bans(rows: Rows[Sequence], vocab_size: int) -> tuple[list[int], list[list[int]]]:
    """Each row's minimum, 0 where it has no stop id, and its stop ids padded to one width by repeating the first.

    No ids at all when every row has reached its minimum; a row without any is padded with id 0, to no effect.
    """
    if not any(row.num_response < row.request.sampling.min_new_tokens for row in rows):
        return [0] * len(rows), [[] for _ in rows]
    ids = [sorted(i for i in row.stop_ids if 0 <= i < vocab_size) for row in rows]
    width = max(map(len, ids))
    minima = [row.request.sampling.min_new_tokens if own else 0 for row, own in zip(rows, ids, strict=True)]
    return minima, [[*own, *[own[0] if own else 0] * (width - len(own))] for own in ids]


def _hash(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 16)) * _MIX[0]
    x = (x ^ _shift(x, 15)) * _MIX[1]
    return x ^ _shift(x, 16)


def _shift(x: Tensor, by: int) -> Tensor:
    """Shift int32 right, filling with zeros."""
    return (x >> by) & ((1 << (32 - by)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
