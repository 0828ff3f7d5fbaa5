"""Keys and values of all layers, in blocks.

Knows shapes and slots; which row owns which block is the block manager's. A slot is block * block_size + offset;
block 0 is for padding rows. Shape letters: K key/value heads, D head dim of keys, E of values.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil  # type: ignore[import-untyped,unused-ignore]
import torch
from torch import Tensor

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
    """Zeroed tensors for ``num_blocks`` blocks besides the padding block."""

    def __init__(self, shapes: dict[int, LayerShape], num_blocks: int, block_size: int, device: torch.device) -> None:
        self.num_blocks, self.block_size, self.device = num_blocks, block_size, device
        slots = (num_blocks + 1) * block_size
        # zeros, not empty: masked positions are multiplied by 0, and 0 * nan is nan
        self._keys = {
            i: torch.zeros(slots, s.num_heads, s.key_dim, dtype=s.dtype, device=device) for i, s in shapes.items()
        }
        self._values = {
            i: torch.zeros(slots, s.num_heads, s.value_dim, dtype=s.dtype, device=device) for i, s in shapes.items()
        }

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put key [N, K, D] and value [N, K, E] at slots [N]; returns all slots of the layer, keys and values."""
        keys, values = self._keys[layer], self._values[layer]
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)
        return keys, values


class _ShapeProbe:
    """An attention that only notes what each layer gives it."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2], key.dtype, softcap is not None)
        return query.new_zeros(*query.shape[:2], value.shape[2])


def layer_shapes(model: CausalLM, device: torch.device) -> dict[int, LayerShape]:
    """What each layer caches, seen in a forward of one token: no guess from the model's config."""
    probe = _ShapeProbe()
    with torch.no_grad():
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        model.hidden(zero, zero, probe)
    return probe.shapes


def affordable_tokens(shapes: dict[int, LayerShape], device: torch.device, frac: float) -> int:
    """Tokens whose keys and values take ``frac`` of the memory that is free on ``device`` now."""
    if device.type == "cuda":
        held_back = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + held_back
    else:
        free = psutil.virtual_memory().available
    return int(free * frac) // sum(shape.bytes_per_token for shape in shapes.values())
