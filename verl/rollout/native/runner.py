"""Rows to flat tensors, through the model, to sampled tokens.

Knows the model and the cache; which rows run and where their blocks lie is decided before. Shape letters: N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from verl.models.attention import Attention
from verl.models.causal_lm import CausalLM
from verl.rollout.native.cache import KVCache, LayerShape
from verl.rollout.native.decode import EagerDecoder
from verl.rollout.native.graph import GraphDecoder
from verl.rollout.native.paged_attention import GatherAttention, VarlenAttention
from verl.rollout.native.sampler import SamplingState, sample
from verl.rollout.native.scheduler import Chunk
from verl.rollout.native.sequence import Sequence

Sampled = tuple[list[list[int]], list[list[float]]]  # [steps][rows] tokens and log-probs


class Runner:
    """Runs prompts and decode steps of one model over one cache."""

    def __init__(self, model: CausalLM, cache: KVCache, shapes: dict[int, LayerShape], *, use_cuda_graph: bool) -> None:
        self._model, self._cache = model, cache
        on_cuda = cache.device.type == "cuda"
        halves = all(s.dtype in (torch.bfloat16, torch.float16) and not s.has_softcap for s in shapes.values())
        self._use_varlen = on_cuda and halves
        self._decoder: EagerDecoder | GraphDecoder = (
            GraphDecoder(model, cache) if on_cuda and use_cuda_graph else EagerDecoder(model, cache, use_kernel=on_cuda)
        )

    @property
    def steps(self) -> int:
        """Tokens a row that one ``decode`` should make."""
        return self._decoder.steps

    def prefill(self, chunks: Rows[Chunk]) -> Sampled:
        """Compute the chunks' tokens; one sampled token for each chunk that ends its row."""
        self._decoder.reset()
        tokens = [token for c in chunks for token in c.sequence.tokens[c.start : c.end]]
        positions = [position for c in chunks for position in range(c.start, c.end)]
        hidden = self._model.hidden(self._tensor(tokens), self._tensor(positions), self._attention(chunks))
        ends = torch.tensor([c.end - c.start for c in chunks]).cumsum(0) - 1
        wanted = [i for i, c in enumerate(chunks) if c.is_last]
        if not wanted:
            return [], []
        state = SamplingState.of([chunks[i].sequence for i in wanted], self._model.vocab_size, self._cache.device)
        sampled, log_probs = sample(self._model.logits(hidden[ends[wanted].to(hidden.device)]), state)
        return [sampled.tolist()], [log_probs.tolist()]

    def decode(self, rows: Rows[Sequence], steps: int) -> Sampled:
        """``steps`` tokens of each row; their blocks must be there."""
        return self._decoder.decode(rows, steps)

    def _attention(self, chunks: Rows[Chunk]) -> Attention:
        starts, queries = [c.start for c in chunks], [c.end - c.start for c in chunks]
        slots = self._slots([(c.sequence, c.start, c.end) for c in chunks])
        if self._use_varlen:
            key_slots = self._slots([(c.sequence, 0, c.end) for c in chunks]) if any(starts) else None
            return VarlenAttention(self._cache, slots, key_slots, starts, queries)
        width = max(len(c.sequence.blocks) for c in chunks)
        tables = [[*c.sequence.blocks, *[0] * (width - len(c.sequence.blocks))] for c in chunks]
        return GatherAttention(self._cache, slots, self._tensor(tables), starts, queries)

    def _slots(self, spans: list[tuple[Sequence, int, int]]) -> Tensor:
        """[N] int64: the slot of each token from start to end of each row."""
        size = self._cache.block_size
        parts = []
        for row, start, end in spans:
            blocks = torch.tensor(row.blocks[start // size : -(-end // size)])
            slots = (blocks[:, None] * size + torch.arange(size)).flatten()
            first = start // size * size
            parts.append(slots[start - first : end - first])
        return torch.cat(parts).to(self._cache.device)

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._cache.device)
