"""One token for each running row: the step that advances the rows' tensors in place, and its plain caller.

Takes rows whose blocks are allocated; gives tokens and log-probs. The step reads nothing from the host and so can be
captured in a CUDA graph. Shape letters: B rows, W blocks of the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from verl.models.attention import Attention
from verl.models.causal_lm import CausalLM
from verl.rollout.native.cache import KVCache
from verl.rollout.native.decode_state import DecodeState
from verl.rollout.native.paged_attention import GatherAttention
from verl.rollout.native.sampler import sample
from verl.rollout.native.sequence import Sequence


def advance(model: CausalLM, state: DecodeState, attention: Attention) -> tuple[Tensor, Tensor]:
    """Compute one token a row and step the state in place; returns tokens [B] and log-probs [B]."""
    hidden = model.hidden(state.tokens, state.positions, attention)
    tokens, log_probs = sample(model.logits(hidden), state.sampling)
    state.tokens.copy_(tokens)
    state.positions.add_(1)
    torch.minimum(state.positions, state.last, out=state.positions)
    state.sampling.index.add_(1)
    return tokens, log_probs


class EagerDecoder:
    """Steps without a graph. The state lives on while the same rows run and nothing else is computed between.

    steps  tokens that the engine should ask for at once
    """

    def __init__(self, model: CausalLM, cache: KVCache, *, use_kernel: bool) -> None:
        self._model, self._cache, self._use_kernel = model, cache, use_kernel
        self.steps = 8 if cache.device.type == "cuda" else 1
        self._rows: list[Sequence] = []
        self._state: DecodeState | None = None
        self._held: list[int] = []

    def reset(self) -> None:
        """Rows advanced by other means: read them anew."""
        self._state = None

    def decode(self, rows: Rows[Sequence], steps: int) -> tuple[list[list[int]], list[list[float]]]:
        """``steps`` tokens of each row: [steps][B] tokens and log-probs."""
        state = self._current(rows)
        made = [self._step(state, [min(len(r.tokens) - 1 + i, r.max_cached - 1) for r in rows]) for i in range(steps)]
        if steps > 1:
            self.reset()  # rows may have ended on the way
        return torch.stack([t for t, _ in made]).tolist(), torch.stack([p for _, p in made]).tolist()

    def _step(self, state: DecodeState, starts: list[int]) -> tuple[Tensor, Tensor]:
        attention: Attention
        if self._use_kernel:
            from verl.rollout.native.triton_decode import KernelAttention

            attention = KernelAttention(self._cache, state)
        else:
            slots = state.slots(self._cache.block_size)
            attention = GatherAttention(self._cache, slots, state.tables, starts, [1] * len(starts))
        return advance(self._model, state, attention)

    def _current(self, rows: Rows[Sequence]) -> DecodeState:
        if self._state is None or self._rows != rows:
            width = max(self._cache_width(row) for row in rows)
            self._rows = list(rows)
            self._state = DecodeState.of(rows, self._model.vocab_size, width, self._cache.device)
        else:
            for i, row in enumerate(rows):
                if len(row.blocks) != self._held[i]:
                    fresh = torch.tensor(row.blocks[self._held[i] :])
                    self._state.tables[i, self._held[i] : len(row.blocks)] = fresh.to(self._cache.device)
        self._held = [len(row.blocks) for row in rows]
        return self._state

    def _cache_width(self, row: Sequence) -> int:
        return -(-row.max_cached // self._cache.block_size)
