"""How many floating-point operations a step needs, and which share of the hardware's peak that was.

A model's shape and sequence lengths come in; FLOPs and MFU go out. Model FLOPs are counted,
as Chowdhery et al. 2022, arXiv:2204.02311, appendix B do: work that is done twice to save memory isn't.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_POSITIONS = re.compile(r"(wpe|embed_positions|position_embeddings)\.weight$")
_EMBEDDING = re.compile(rf"(embed_tokens|wte)\.weight$|{_POSITIONS.pattern}")

PEAK_FLOPS: dict[str, float] = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX A6000": 154.8e12,
    "RTX 6000 Ada": 364.2e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 3090": 71e12,
    "RTX 4090": 165.2e12,
    "RTX 5090": 209.5e12,
    "MI300X": 1307.4e12,
    "MI250X": 383e12,
}
"""Dense bfloat16 operations a second of one device, by what its name holds; the makers' data sheets, no sparsity."""


def peak_flops(device_name: str) -> float | None:
    """The peak of ``device_name`` (as ``torch.cuda.get_device_name`` gives it); None where it isn't known.

    A slice of a GPU (MIG) and a laptop's version of one are other hardware under the same name: None too.
    """
    if re.search(r"\bMIG\b|laptop|max-q", device_name, re.IGNORECASE):
        return None
    known = [name for name in PEAK_FLOPS if re.search(rf"\b{re.escape(name)}\b", device_name, re.IGNORECASE)]
    return PEAK_FLOPS[max(known, key=len)] if known else None


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the FLOPs of a model depend on.

    active_parameters  parameters that each token is multiplied with: all matrices but the input embedding. Of the
                       experts of a mixture those a token is sent to count; tied embeddings count once, as the head
    attention_width    query heads times the dims of each
    windows            the sliding window of each layer in tokens, None where a token sees all before it
    """

    active_parameters: int
    attention_width: int
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, module: Any) -> ModelShape:
        """The shape of a Hugging Face model, on any device; sharded parameters count whole."""
        text = module.config.get_text_config()
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(
            active_parameters=_active_parameters(text, module.named_parameters()),
            attention_width=text.num_attention_heads * head_dim,
            windows=tuple(_windows(text)),
        )


def forward_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    """FLOPs of one forward pass over sequences of ``lengths`` tokens.

    ``2 N`` a token for N active parameters, and in each layer ``4 W`` for each pair of a token and one that it sees
    (W the attention width): ``2 W`` for the score and as much for the weighted value.
    """
    pairs = sum(_pairs(length, window) for window in shape.windows for length in lengths)
    return 2.0 * shape.active_parameters * sum(lengths) + 4.0 * shape.attention_width * pairs


def training_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    """FLOPs of a forward and a backward pass, which costs twice the forward: ``6 N`` a token and causal attention."""
    return 3.0 * forward_flops(shape, lengths)


def mfu(flops: float, seconds: float, device: torch.device | str, num_devices: int = 1) -> float | None:
    """The share of the devices' peak that ``flops`` in ``seconds`` is, 0 to 1; None where the peak isn't known.

    flops   of all ``num_devices`` together
    device  one of them, or its name; the CPU's peak isn't known
    """
    name = device if isinstance(device, str) else _device_name(device)
    peak = peak_flops(name)
    return None if peak is None or seconds <= 0 else flops / (seconds * peak * num_devices)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _active_parameters(text: Any, parameters: Iterable[tuple[str, Tensor]]) -> int:
    share = _experts_share(text)
    is_tied = bool(getattr(text, "tie_word_embeddings", False))
    total = 0.0
    for name, parameter in parameters:
        is_kept = not _EMBEDDING.search(name) or (is_tied and not _POSITIONS.search(name))
        if parameter.dim() >= 2 and is_kept:
            total += parameter.numel() * (share if ".experts." in name else 1.0)
    return round(total)


def _pairs(length: int, window: int | None) -> int:
    """Pairs of a token and one it sees, itself among them."""
    full = min(length, window) if window else length
    return full * (full + 1) // 2 + (length - full) * full


def _windows(text: Any) -> list[int | None]:
    """The sliding window of each layer, None where it sees everything."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        uses_window = getattr(text, "use_sliding_window", True)
        return [window if uses_window else None] * text.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _experts_share(text: Any) -> float:
    used = getattr(text, "num_experts_per_tok", None)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    total = next((getattr(text, name) for name in names if getattr(text, name, None)), None)
    return float(used / total) if used and total else 1.0
