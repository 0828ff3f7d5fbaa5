"""Keys and values of all layers, in blocks.

Knows shapes and slots; which row owns which block is the block manager's. A slot is block * block_size + offset;
block 0 is for padding rows. Shape letters: K key/value heads, D head dim of keys, E of values.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil  # type: ignore[import-untyped,unused-ignore]
import torch
from torch import Tensor

from verl.models.attention import Scoring
from verl.models.causal_lm import CausalLM


@dataclass(frozen=True)
class LayerShape:
    """What one layer caches for a token, keys [K, D] and values [K, E], and whether its attention has a softcap."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    has_softcap: bool = False

    @property
    def bytes_per_token(self) -> int:
        """Size of a token's keys and values."""
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class KVCache:
    """Zeroed tensors for ``num_blocks`` blocks besides the padding block; the memory can be given back and retaken."""

    def __init__(self, shapes: dict[int, LayerShape], num_blocks: int, block_size: int, device: torch.device) -> None:
        self.block_size, self.device, self._shapes = block_size, device, shapes
        self.num_blocks = 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self.take(num_blocks)

    @property
    def num_bytes(self) -> int:
        """Memory held now."""
        return sum(t.nbytes for t in [*self._keys.values(), *self._values.values()])

    def take(self, num_blocks: int) -> None:
        """Take memory for ``num_blocks`` blocks, in place of what is held."""
        self.release()
        self.num_blocks = num_blocks
        slots = (num_blocks + 1) * self.block_size
        for i, s in self._shapes.items():
            # zeros, not empty: masked positions are multiplied by 0, and 0 * nan is nan
            self._keys[i] = torch.zeros(slots, s.num_heads, s.key_dim, dtype=s.dtype, device=self.device)
            self._values[i] = torch.zeros(slots, s.num_heads, s.value_dim, dtype=s.dtype, device=self.device)

    def release(self) -> None:
        """Give the memory back; nothing may be written or read until ``take``."""
        self.num_blocks = 0
        self._keys, self._values = {}, {}

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """All slots of a layer: keys [slots, K, D] and values [slots, K, E]."""
        return self._keys[layer], self._values[layer]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put key [N, K, D] and value [N, K, E] at slots [N]; returns all slots of the layer, keys and values."""
        keys, values = self.layer(layer)
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)
        return keys, values

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks, [n] int64 each, in every layer."""
        for tensor in [*self._keys.values(), *self._values.values()]:
            blocks = tensor.view(-1, self.block_size, *tensor.shape[1:])
            blocks.index_copy_(0, target, blocks[source])


class _ShapeProbe:
    """An attention that only notes what each layer gives it."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        self.shapes[layer] = LayerShape(
            key.shape[1], key.shape[2], value.shape[2], key.dtype, scoring.softcap is not None
        )
        return query.new_zeros(*query.shape[:2], value.shape[2])


def layer_shapes(model: CausalLM, device: torch.device) -> dict[int, LayerShape]:
    """What each layer caches, seen in a forward of one token: no guess from the model's config."""
    probe = _ShapeProbe()
    with torch.no_grad():
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        model.hidden(zero, zero, probe)
    return probe.shapes


def affordable_tokens(shapes: dict[int, LayerShape], device: torch.device, frac: float, *, held_bytes: int = 0) -> int:
    """Tokens whose keys and values take ``frac`` of what is free on ``device`` once ``held_bytes`` are given back."""
    if device.type == "cuda":
        held_back = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + held_back
    else:
        free = psutil.virtual_memory().available
    return int((free + held_bytes) * frac) // sum(shape.bytes_per_token for shape in shapes.values())
