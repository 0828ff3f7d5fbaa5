"""Decode steps: one token for each of the first rows of the state, which the step advances in place.

``TorchStep`` is the definition, in torch operations, for any device; ``KernelStep`` is the same on CUDA in fused
kernels and reads nothing from the host, so it can be captured in a graph. Shape letters: B rows, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from verl.models.attention import Attention
from verl.models.causal_lm import CausalLM
from verl.rollout.native.advance import Outputs, advance
from verl.rollout.native.cache import KVCache
from verl.rollout.native.paged_attention import GatherAttention
from verl.rollout.native.row_state import RowState
from verl.rollout.native.sampler import sample

Step = Callable[[RowState, Outputs, bool], None]
"""Computes a token for every row of the state and advances it; the last argument: whether a row truncates."""


class TorchStep:
    """A step in torch operations; the host reads the positions."""

    def __init__(self, model: CausalLM, cache: KVCache) -> None:
        self._model, self._cache = model, cache

    def __call__(self, rows: RowState, out: Outputs, truncates: bool) -> None:
        """Advance ``rows``."""
        starts = rows.positions.clamp(min=0)
        slots = rows.slots_in_cache(self._cache.block_size)
        attention = GatherAttention(self._cache, slots, rows.tables, starts.tolist(), [1] * rows.num_slots)
        self.sample(self.hidden(rows.tokens.long(), starts.long(), attention), rows, out, truncates)
        out.count.add_(1)

    def cache_moved(self) -> None:
        """Nothing to do: the cache is asked for its tensors at every step."""

    def hidden(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Last hidden states [N, C] of tokens [N] at positions [N]."""
        return self._model.hidden(tokens, positions, attention)

    def sample(self, hidden: Tensor, rows: RowState, out: Outputs, truncates: bool) -> None:
        """From the last hidden states [B, C] of the rows on."""
        tokens, log_probs = sample(self._model.logits(hidden), rows, truncates=truncates)
        advance(tokens, log_probs, rows, out)
