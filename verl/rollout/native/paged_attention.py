"""Attention over the paged cache, as the object that every layer calls.

``GatherAttention`` serves any mix of query lengths on any device: prompts, pieces of prompts, prompts whose beginning
is cached, decode. ``VarlenAttention`` is its CUDA half for prompts; the CUDA decode is in ``kernel_step``.
All first write the new keys and values, so rows of one step may read blocks that the step itself fills.

Shape letters: N tokens of the step, H query heads, K key/value heads, D and E head dims of keys and values,
B rows, T longest query, L longest cached row (whole blocks).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from verl.models.attention import Scoring, softcapped_attention, varlen
from verl.rollout.native.cache import KVCache

_SMALL = 1 << 18  # padded query-key pairs below which one call for all rows is the cheapest


class GatherAttention:
    """Rows' blocks gathered side by side, padded to the longest, then SDPA under a mask made from positions.

    tables    [B, W] int64  blocks of each row, 0 right of its last
    starts    [B]  position of each row's first query
    queries   [B]  queries of each row; they sum to N
    """

    def __init__(
        self, cache: KVCache, slots: Tensor, tables: Tensor, starts: Sequence[int], queries: Sequence[int]
    ) -> None:
        self.cache, self.slots = cache, slots
        ends = [start + n for start, n in zip(starts, queries, strict=True)]
        self._groups = [
            _Group(cache, tables[a:b], starts[a:b], queries[a:b], max(ends[a:b])) for a, b in _cut(queries, ends)
        ]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        keys, values = self.cache.write(layer, self.slots, key, value)
        return self.attend(query, keys, values, scoring)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        """query [N, H, D] over the layer's slots, keys [slots, K, D] and values [slots, K, E]; returns [N, H, E]."""
        if len(self._groups) == 1:
            return self._groups[0].attend(query, keys, values, scoring)
        parts = torch.split(query, [group.num_tokens for group in self._groups])
        pairs = zip(self._groups, parts, strict=True)
        return torch.cat([group.attend(part, keys, values, scoring) for group, part in pairs])


class _Group:
    """Neighbouring rows padded to one shape: B rows of T queries and L keys."""

    def __init__(
        self, cache: KVCache, tables: Tensor, starts: Sequence[int], queries: Sequence[int], longest: int
    ) -> None:
        self.num_tokens, self._size = sum(queries), cache.block_size
        self._rows, self._width = len(queries), max(queries)
        num_blocks = -(-longest // self._size)
        self._length = num_blocks * self._size
        self._blocks = tables[:, :num_blocks].reshape(-1)
        device = tables.device
        counts, offset = torch.tensor(queries), torch.arange(self._width)
        is_real = offset[None, :] < counts[:, None]
        positions = torch.where(is_real, torch.tensor(starts)[:, None] + offset, 0)
        self._positions = positions.to(device)
        is_padded = self.num_tokens != self._rows * self._width
        self._real = is_real.flatten().nonzero()[:, 0].to(device) if is_padded else None
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        key, value = self._gather(keys), self._gather(values)  # [B, K, L, .]
        mask = self._mask(scoring.window)
        if self._width == 1:  # the query heads of a key head stand in for queries: no key is repeated
            rows = query.reshape(len(query), key.shape[1], -1, query.shape[-1])  # [B, K, H / K, D]
            return _attend(rows, key, value, mask, scoring).flatten(1, 2)
        rows = self._pad(query).transpose(1, 2)  # [B, H, T, D]
        out = _attend(rows, key, value, mask, scoring).transpose(1, 2).flatten(0, 1)
        return out if self._real is None else out[self._real]

    def _gather(self, slots: Tensor) -> Tensor:
        blocks = slots.view(-1, self._size, *slots.shape[1:]).index_select(0, self._blocks)
        return blocks.view(self._rows, self._length, *slots.shape[1:]).transpose(1, 2)

    def _pad(self, query: Tensor) -> Tensor:
        if self._real is not None:
            padded = query.new_zeros(self._rows * self._width, *query.shape[1:])
            query = padded.index_copy_(0, self._real, query)
        return query.reshape(self._rows, self._width, *query.shape[1:])

    def _mask(self, window: int | None) -> Tensor:
        """[B, 1, T, L] bool, True where a key is at or before the query and inside its window."""
        if window is not None and window >= self._length:
            window = None
        if window not in self._masks:
            key_positions = torch.arange(self._length, device=self._positions.device)
            distance = self._positions[:, None, :, None] - key_positions
            self._masks[window] = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        return self._masks[window]


class VarlenAttention:
    """Prompts on CUDA: torch's variable-length kernel, over the new keys alone or over gathered ones.

    key_slots  [sum of the rows' tokens so far] slots in order, None when no row has tokens cached before this step
    """

    def __init__(
        self,
        cache: KVCache,
        slots: Tensor,
        key_slots: Tensor | None,
        starts: Sequence[int],
        queries: Sequence[int],
    ) -> None:
        self.cache, self.slots = cache, slots
        ends = [start + n for start, n in zip(starts, queries, strict=True)]
        self._key_slots, self._max_query, self._max_key = key_slots, max(queries), max(ends)
        self._query_offsets = _offsets(queries, slots.device)
        self._key_offsets = _offsets(ends, slots.device) if any(starts) else self._query_offsets

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        assert scoring.softcap is None, "the runner gives layers with a softcap to GatherAttention"
        keys, values = self.cache.write(layer, self.slots, key, value)
        if self._key_slots is not None:
            key, value = keys[self._key_slots], values[self._key_slots]
        offsets = (self._query_offsets, self._key_offsets)
        return varlen(query, key, value, *offsets, self._max_query, self._max_key, scoring)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    if scoring.softcap is not None:
        return softcapped_attention(query, key, value, mask, scoring.scale, scoring.softcap)
    is_grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scoring.scale, enable_gqa=is_grouped)


def _cut(queries: Sequence[int], ends: Sequence[int]) -> list[tuple[int, int]]:
    """Cut rows into neighbouring groups whose padding at most doubles the work, unless the work is small."""
    cuts: list[tuple[int, int]] = []
    first, widest, longest, real = 0, 0, 0, 0
    for i, (n, end) in enumerate(zip(queries, ends, strict=True)):
        padded = (i + 1 - first) * max(widest, n) * max(longest, end)
        if i > first and padded > max(2 * (real + n * end), _SMALL):
            cuts.append((first, i))
            first, widest, longest, real = i, 0, 0, 0
        widest, longest, real = max(widest, n), max(longest, end), real + n * end
    return [*cuts, (first, len(queries))]


def _offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    return pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(device=device, dtype=torch.int32)
