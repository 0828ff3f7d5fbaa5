"""A model as a folder that plain transformers loads, and what an engine reads back of it.

In comes a live module, or copies of its tensors, and an empty folder. When and where it is written is the store's
business (``checkpoint.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.common.errors import CheckpointError
from verl.common.files import write_json
from verl.common.ranks import is_first_rank
from verl.models.attention import ATTENTION
from verl.models.lora import has_adapter, load_adapter, save_adapter, without_adapter_names
from verl.models.networks import Network

_WEIGHTS = "critic.safetensors"


def save_model(
    folder: Path,
    module: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a folder that transformers' ``from_pretrained`` of the module's kind, and of its tokenizer, loads.

    dtype    type of the floating-point weights in the files; by default the module's own
    weights  in place of the module's own parameters and buffers, where those are slices or in use
    The module stays as it is. Its generation configuration is carried as it is, valid in transformers' eyes or not:
    a sampling default must not cost a checkpoint. The tokenizer carries its chat template.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = module.state_dict() if weights is None else dict(weights)
    if dtype is not None:
        state = converted(state, dtype)
    with _without_generation_config(module):
        module.save_pretrained(folder, state_dict=state)
    if module.can_generate() and module.generation_config is not None:
        module.generation_config.to_json_file(folder / "generation_config.json", use_diff=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if weights is not None and dtype is None:  # the module's own may be float32 slices of what is computed in another
        dtype = next((tensor.dtype for tensor in weights.values() if tensor.is_floating_point()), None)
    write_json(folder / "config.json", clean_config(config, dtype))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def buffers_of(network: Network) -> dict[str, Tensor]:
    """What a checkpoint's folder of ``network`` holds besides parameters: with an adapter or a head of its own nothing.

    Gathers nothing, but ends a sharded forward pass.
    """
    if not isinstance(network.module, PreTrainedModel) or has_adapter(network.module):
        return {}
    return _saved_buffers(network.module)


def _saved_buffers(module: PreTrainedModel) -> dict[str, Tensor]:
    saved = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}


def save_weights(
    folder: Path, network: Network, weights: Mapping[str, Tensor], tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """The first rank writes ``weights``, whole, of ``network``: a model folder, an adapter's where it has one, or a
    file where it has a head that transformers doesn't know.

    Of the network's own tensors none is read: they may be in use.
    """
    if not is_first_rank():
        return
    if isinstance(network.module, PreTrainedModel) and has_adapter(network.module):
        save_adapter(folder, network.lm.module, weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    elif isinstance(network.module, PreTrainedModel):
        save_model(folder, network.module, tokenizer, weights=weights)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / _WEIGHTS)


def save_base(folder: Path, network: Network, weights: Mapping[str, Tensor]) -> None:
    """The first rank writes the model that ``network``'s adapter was added to, from its whole ``weights``."""
    if is_first_rank():
        module = network.lm.module
        save_model(folder, module, weights=without_adapter_names({**_saved_buffers(module), **weights}))


def load_weights(folder: Path, network: Network) -> dict[str, Tensor]:
    """What ``save_weights`` wrote, by parameter name; tied ones under each of their names."""
    if not isinstance(network.module, PreTrainedModel):
        return load_file(folder / _WEIGHTS)
    if has_adapter(network.module):
        return load_adapter(folder)
    dtype = next(network.module.parameters()).dtype
    saved = type(network.module).from_pretrained(folder, dtype=dtype)
    return dict(saved.named_parameters(remove_duplicate=False))


def converted(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """``tensors`` with the floating-point ones as ``dtype``; names that share storage still share it.

    Raises CheckpointError naming a tensor whose finite values would overflow.
    """
    done: dict[tuple[Any, ...], Tensor] = {}
    result = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            result[name] = tensor
            continue
        if key not in done or tensor.numel() == 0:
            done[key] = tensor.detach().to(dtype)
            if not bool((done[key].isfinite() | ~tensor.isfinite()).all()):
                raise CheckpointError(f"{name} has values beyond the range of {dtype}: choose bfloat16 or float32")
        result[name] = done[key]
    return result


def clean_config(config: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """A ``config.json`` without this library's attention name, saying ``dtype`` (None: as it was) at every level."""
    cleaned: dict[str, Any] = {}
    for key, value in config.items():
        if "attn_implementation" in key and ATTENTION in (value.values() if isinstance(value, dict) else [value]):
            continue
        if key in ("dtype", "torch_dtype") and dtype is not None and isinstance(value, str):
            value = str(dtype).removeprefix("torch.")
        cleaned[key] = clean_config(value, dtype) if isinstance(value, dict) else value
    return cleaned


@contextmanager
def _without_generation_config(module: PreTrainedModel) -> Iterator[None]:
    """transformers refuses to save a model whose generation configuration it finds inconsistent."""
    from transformers import GenerationConfig

    if not module.can_generate():  # it has none
        yield
        return
    kept = module.generation_config
    module.generation_config = None if kept is None else GenerationConfig()
    try:
        yield
    finally:
        module.generation_config = kept
