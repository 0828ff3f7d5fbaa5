"""Log-probs and entropies of chosen tokens without the [tokens, vocab] matrix.

Hidden states come in, two numbers a token go out. Logits exist for one chunk of tokens at a time; the backward pass
makes them again and hands their gradient, written in closed form, to the head. On CUDA a kernel makes each of the two
in one pass over what the head gave; elsewhere torch does, in float32 copies of it.

Shape letters: M tokens, C hidden, V vocab.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verl.models.causal_lm import CausalLM

CHUNK_ELEMENTS = 2**27
"""Logits that exist at once (float32: 512 MiB, and twice that beside them): bounds memory whatever the vocabulary."""


def log_probs_and_entropy(
    lm: CausalLM, hidden: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, softmax(logits / temperature).

    hidden   [M, C]  states that predict the targets
    targets  [M]     int64
    Returns log-probs [M] and entropies [M] in nats, float32; entropies carry a gradient only with
    ``entropy_gradient``.
    """
    head = [p for p in lm.head.parameters() if p.requires_grad]
    log_probs, entropy = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]
        lm, targets, temperature, hidden, *head
    )
    return log_probs, entropy if entropy_gradient else entropy.detach()


class _TokenLogProbs(torch.autograd.Function):
    """d log_prob / d logits = (onehot - p) / T;  d entropy / d logits = -p (log p + H) / T."""

    @staticmethod
    def forward(
        ctx: Any, lm: CausalLM, targets: Tensor, temperature: float, hidden: Tensor, *head: Tensor
    ) -> tuple[Tensor, Tensor]:
        made = hidden.new_empty(3, len(hidden), dtype=torch.float32)
        ways = _Fused(lm, temperature) if _has_kernels(hidden) else _Plain(lm, temperature)
        for part in _chunks(len(hidden), lm.vocab_size):
            made[:, part] = torch.stack(ways.statistics(ways.logits(hidden[part]), targets[part]))
        log_probs, entropy, log_sum = made
        ctx.set_materialize_grads(False)
        ctx.lm, ctx.ways = lm, ways
        ctx.save_for_backward(targets, hidden, entropy, log_sum, *head)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        targets, hidden, entropy, log_sum, *head = ctx.saved_tensors
        hidden_grad = torch.empty_like(hidden)
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in head]
        for part in _chunks(len(hidden), ctx.lm.vocab_size):
            with torch.enable_grad():
                states = hidden[part].detach().requires_grad_()
                logits = ctx.ways.logits(states)
            to_both = [None if grad is None else grad[part] for grad in grads]
            grad = ctx.ways.gradient(logits.detach(), targets[part], entropy[part], log_sum[part], *to_both)
            found = torch.autograd.grad(logits, [states, *head], grad)
            hidden_grad[part] = found[0]
            for total, piece in zip(sums, found[1:], strict=True):
                total += piece
            del logits, grad  # or they would stand beside those of the next chunk
        return None, None, None, hidden_grad, *(s.to(p.dtype) for s, p in zip(sums, head, strict=True))


def _has_kernels(hidden: Tensor) -> bool:
    return hidden.is_cuda and importlib.util.find_spec("triton") is not None


class _Fused:
    """As ``_Plain``, by kernels on what the head gives."""

    def __init__(self, lm: CausalLM, temperature: float) -> None:
        from verl.models import log_prob_kernels

        scale = log_prob_kernels.Scale(lm.logit_scale, lm.softcap, temperature)
        self.logits = lm.head
        self.statistics = partial(log_prob_kernels.token_statistics, scale=scale)
        self.gradient = partial(log_prob_kernels.head_gradient, scale=scale)


class _Plain:
    """From hidden states to logits [M, V], from those to the numbers of each token, and the gradient's way back.

    By torch, on float32 logits; their log-sum-exp, which the kernels need again, is of no use to it.
    """

    def __init__(self, lm: CausalLM, temperature: float) -> None:
        self.logits, self._temperature = lm.logits, temperature

    def statistics(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-prob, entropy and log-sum-exp, [M] each."""
        all_log_probs = _tempered(logits, self._temperature).log_softmax(-1)
        log_probs = all_log_probs.gather(-1, targets[:, None])[:, 0]
        return log_probs, -_row_dot(all_log_probs.exp(), all_log_probs), torch.empty_like(log_probs)

    def gradient(
        self,
        logits: Tensor,
        targets: Tensor,
        entropy: Tensor,
        log_sum: Tensor,
        to_log_prob: Tensor | None,
        to_entropy: Tensor | None,
    ) -> Tensor:
        """[M, V] with respect to ``logits``; None stands for no gradient."""
        grad = _logits_grad(  # no name for the log-probs here: they would stand beside what is made of them
            _tempered(logits, self._temperature).log_softmax(-1), targets, to_log_prob, to_entropy, entropy
        )
        return _tempered(grad, self._temperature)


def _logits_grad(
    all_log_probs: Tensor, targets: Tensor, to_log_prob: Tensor | None, to_entropy: Tensor | None, entropy: Tensor
) -> Tensor:
    """[M, V] gradient of the tempered logits; uses up ``all_log_probs``. None stands for no gradient."""
    if to_log_prob is None:
        to_log_prob = torch.zeros_like(entropy)
    if to_entropy is None:
        grad = all_log_probs.exp_().mul_(-to_log_prob[:, None])
    else:
        probs = all_log_probs.exp()
        weight = all_log_probs.add_(entropy[:, None]).mul_(to_entropy[:, None]).add_(to_log_prob[:, None])
        grad = probs.mul_(weight).neg_()
    return grad.scatter_add_(-1, targets[:, None], to_log_prob[:, None])


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits / temperature


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """Dot product of each row, without the [M, V] product in between."""
    return torch.bmm(a[:, None, :], b[:, :, None])[:, 0, 0]


def _chunks(rows: int, vocab_size: int) -> Iterator[slice]:
    size = max(1, CHUNK_ELEMENTS // vocab_size)
    return (slice(start, start + size) for start in range(0, rows, size))
