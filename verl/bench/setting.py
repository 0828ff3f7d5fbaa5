"""What a benchmark ran on, and how its figures are printed; the small model that both benchmarks default to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import nn

import verl

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

SMALL_MODEL: dict[str, Any] = {
    "scratch": {
        "model_type": "qwen2",
        "vocab_size": 4096,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    "tokenizer": f"chars:{LETTERS}",
}
"""The ``model`` section of a shape that a laptop runs in seconds; overrides make it any other."""


def machine_setting(device: torch.device, module: nn.Module) -> dict[str, Any]:
    """Device, versions and the number of ``module``'s parameters, as every benchmark reports them."""
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else f"cpu, {torch.get_num_threads()} threads"
    return {
        "device": name,
        "verl": verl.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "parameters": sum(p.numel() for p in module.parameters()),
    }


def figure_lines(found: Mapping[str, Any]) -> list[str]:
    """One aligned line a figure; those of a mapping within ``found`` are named ``outer/inner``."""
    flat = dict(_flatten(found))
    width = max((len(name) for name in flat), default=0)
    return [f"{name:<{max(width, 34)}} {_figure(value)}" for name, value in flat.items()]


def _flatten(found: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value


def _figure(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
