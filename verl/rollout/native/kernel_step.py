"""A decode step on CUDA in fused kernels: nothing is read from the host, so that a graph can hold it.

The module itself is unchanged; around it, for as long as a forward runs, its norms, gated layers and neighbouring
projections go through fused kernels (``models.fusion``), and rotary, cache write and attention are one kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.models.attention import Scoring
from verl.models.causal_lm import CausalLM
from verl.models.fused_kernels import rotate
from verl.models.fusion import Fusion
from verl.rollout.native.advance import Outputs
from verl.rollout.native.cache import KVCache, LayerShape
from verl.rollout.native.decode_kernel import CachePlace, offset_from, paged_decode, splits_for
from verl.rollout.native.paged_attention import GatherAttention, VarlenAttention
from verl.rollout.native.row_state import RowState
from verl.rollout.native.sample_kernel import advance_step, sample_step
from verl.rollout.native.sampler import sample


class KernelStep:
    """Steps of ``model`` over ``cache``, whose memory may move between steps if ``cache_moved`` is called."""

    def __init__(self, model: CausalLM, cache: KVCache, shapes: dict[int, LayerShape]) -> None:
        self._model, self._cache = model, cache
        self._fusion = Fusion(model)
        self._can_defer = _hands_on_what_is_rotated(model, self._fusion, cache.device)
        self._places = _Places(cache, shapes)
        self.cache_moved()
        on_cuda = cache.device.type == "cuda"  # elsewhere it is Triton's interpreter
        self._num_sms = torch.cuda.get_device_properties(cache.device).multi_processor_count if on_cuda else 1
        self._kv_heads = max(s.num_heads for s in shapes.values())

    def cache_moved(self) -> None:
        """The cache's memory was taken anew: steps, captured ones too, read it there from now on."""
        self._places.update()

    def __call__(self, rows: RowState, out: Outputs, truncates: bool) -> None:
        """Advance ``rows``."""
        attention = _KernelAttention(
            self._places, rows, self._cache.block_size, splits_for(rows.num_slots, self._kv_heads, self._num_sms)
        )
        with self._fusion.active(attention.rotate if self._can_defer else rotate):
            hidden = self._model.hidden(rows.tokens, rows.positions.clamp(min=0), attention)
        self.sample(hidden, rows, out, truncates)
        out.count.add_(1)

    def hidden(self, tokens: Tensor, positions: Tensor, attention: GatherAttention | VarlenAttention) -> Tensor:
        """Last hidden states [N, C] of prompt tokens [N] at positions [N]."""
        with self._fusion.active(rotate):
            return self._model.hidden(tokens, positions, attention)

    def sample(self, hidden: Tensor, rows: RowState, out: Outputs, truncates: bool) -> None:
        """From the last hidden states [B, C] of the rows on."""
        if truncates:
            advance_step(*sample(self._model.logits(hidden), rows, truncates=True), rows, out)
        else:
            logits = self._model.head(hidden)
            sample_step(logits, rows, out, scale=self._model.logit_scale, softcap=self._model.softcap)


class _KernelAttention:
    """Attention of one token a row; what rotary would have done before it is left to the kernel."""

    def __init__(self, places: _Places, rows: RowState, block_size: int, splits: int) -> None:
        self._places, self._rows, self._block_size, self._splits = places, rows, block_size, splits
        self._rotary: tuple[Tensor, Tensor] | None = None

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Note the angles for the call that follows."""
        self._rotary = (cos, sin)
        return query, key

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        rotary, self._rotary = self._rotary, None
        keys, values = self._places.of(layer)
        out: Tensor = paged_decode(
            query,
            key,
            value,
            keys=keys,
            values=values,
            tables=self._rows.tables,
            positions=self._rows.positions,
            rotary=rotary,
            block_size=self._block_size,
            scale=scoring.scale,
            window=scoring.window,
            softcap=scoring.softcap,
            splits=self._splits,
        )
        return out


class _HandOnProbe:
    """An attention that only sees whether it is given what rotary made, as it made it."""

    def __init__(self) -> None:
        self._made: tuple[int, int] | None = None
        self.is_handed_on = True

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate, and note where the results lie."""
        query, key = rotate(query, key, cos, sin)
        self._made = (query.data_ptr(), key.data_ptr())
        return query, key

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        self.is_handed_on &= self._made in (None, (query.data_ptr(), key.data_ptr()))
        self._made = None
        return value.new_zeros(*query.shape[:2], value.shape[2])


def _hands_on_what_is_rotated(model: CausalLM, fusion: Fusion, device: torch.device) -> bool:
    """Whether every layer's attention gets the rotated query and key untouched: then it may rotate them itself."""
    probe, zero = _HandOnProbe(), torch.zeros(1, dtype=torch.int64, device=device)
    with fusion.active(probe.rotate):
        model.hidden(zero, zero, probe)
    return probe.is_handed_on


class _Places:
    """Where each layer's keys and values lie, as offsets on the device from anchors that stay."""

    def __init__(self, cache: KVCache, shapes: dict[int, LayerShape]) -> None:
        self._cache = cache
        self._anchors = {s.dtype: torch.zeros(16, dtype=s.dtype, device=cache.device) for s in shapes.values()}
        self._offsets = torch.zeros(len(shapes), 2, dtype=torch.int64, device=cache.device)
        self._of = {
            layer: (
                CachePlace(self._anchors[s.dtype], self._offsets[i, :1]),
                CachePlace(self._anchors[s.dtype], self._offsets[i, 1:]),
            )
            for i, (layer, s) in enumerate(shapes.items())
        }

    def of(self, layer: int) -> tuple[CachePlace, CachePlace]:
        """Keys' and values' place."""
        return self._of[layer]

    def update(self) -> None:
        """Read the cache's present addresses."""
        found = [
            [offset_from(place.anchor, tensor) for place, tensor in zip(places, self._cache.layer(layer), strict=True)]
            for layer, places in self._of.items()
        ]
        self._offsets.copy_(torch.tensor(found))
