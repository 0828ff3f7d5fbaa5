"""LoRA: a model whose linear layers each learn a product of two small matrices beside their frozen weight.

In comes a Hugging Face module, out goes the same module, of the same class, with peft's layers in it. Whoever runs it
runs base and adapter together; ``without_adapter`` is the base alone. On disk an adapter is in peft's own format, and
merged there is no trace of it. Knows nothing of optimizers, ranks or runs.

Source: Hu et al. 2021, arXiv:2106.09685, eq. 3: h = W x + alpha / rank * B A x, with B = 0 at the start. Without
dropout, which would make the policy that learns another one than the policy that sampled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, field_validator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.common.errors import CheckpointError, ConfigError, MissingExtra
from verl.common.files import write_json
from verl.common.section import Section
from verl.common.seeding import derive_seed
from verl.models.precision import cast_parameters

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = "default"
_PREFIX = "base_model.model."
"""What peft puts before a module's own names in a file."""


class LoraConfig(Section):
    """An adapter of low rank that learns beside the frozen model, where it has a rank."""

    rank: int | None = Field(None, ge=1)
    """Rows of A and columns of B, such as 16: what an adapter can express, and its size. Null: no adapter, the model
    itself learns."""
    alpha: float = Field(32.0, gt=0)
    """The adapter's product is multiplied by alpha / rank."""
    target_modules: str | list[str] = "all-linear"
    """Linear layers that get an adapter, such as `[q_proj, v_proj]`; all-linear: every one but the head."""

    @property
    def is_on(self) -> bool:
        """Whether there is an adapter."""
        return self.rank is not None

    @field_validator("target_modules")
    @classmethod
    def _some(cls, value: str | list[str]) -> str | list[str]:
        if not value:
            raise ValueError("names no layer: all-linear, or names such as q_proj")
        return value


def check_installed() -> None:
    """Raise MissingExtra where peft isn't there."""
    if find_spec("peft") is None:
        raise MissingExtra("peft", "lora", "an adapter (model.lora.rank)")


def add_adapter(module: PreTrainedModel, config: LoraConfig, *, base: str, seed: int) -> None:
    """Put an adapter into ``module``, in place, and freeze all else. It changes no output before it has learnt.

    base  where the module's own weights are to be found again, for whoever loads the adapter
    seed  of A's first values; B starts at 0
    Raises ConfigError naming ``model.lora.target_modules`` where it doesn't fit the model, MissingExtra without peft.
    """
    peft = _peft()
    if has_adapter(module):
        raise ConfigError("the model has an adapter in it already: merge it first, or leave model.lora.rank out")
    named = _linear_layers(module)
    asked = {config.target_modules} if isinstance(config.target_modules, str) else {*config.target_modules}
    names = {*named} if asked == {"all-linear"} else asked
    if wrong := sorted(names - {*named}):
        raise ConfigError(
            f"model.lora.target_modules names {', '.join(map(repr, wrong))}; the linear layers of this model are "
            f"{', '.join(sorted(named))}"
        )
    described = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=sorted(names),
        fan_in_fan_out=any(not isinstance(named[name], nn.Linear) for name in names),
        task_type=peft.TaskType.CAUSAL_LM,
        base_model_name_or_path=base,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "adapter"))
        peft.inject_adapter_in_model(described, module, adapter_name=_NAME)


def has_adapter(module: nn.Module) -> bool:
    """Whether there are layers of an adapter in ``module``."""
    return any(True for _ in _layers(module))


@contextmanager
def without_adapter(module: nn.Module) -> Iterator[None]:
    """In this block ``module`` computes what its base does. Its weights stay as they are, trainable or not."""
    layers = list(_layers(module))
    for layer in layers:
        layer._disable_adapters = True  # enable_adapters(False) would also stop and restart gradients
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def save_adapter(folder: Path, lm_module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Write trained ``weights``, whole and by the module's own names, as peft reads them.

    lm_module  the causal language model that the adapter was added to, which knows its shape
    weights    of the adapter, and of a head besides (a reward model's), which makes it one of a sequence classifier
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {_PREFIX + name.replace(f".{_NAME}.", "."): tensor.contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    held: Any = lm_module
    kept = held.peft_config[_NAME].to_dict()
    described = {key: sorted(value) if isinstance(value, set) else value for key, value in kept.items()}
    described["inference_mode"] = True
    if heads := sorted({name.rpartition(".")[0] for name in weights if ".lora_" not in name}):
        described |= {"task_type": "SEQ_CLS", "modules_to_save": heads}
    write_json(folder / CONFIG, json.loads(json.dumps(described, default=str)))


def without_adapter_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The base's part of ``weights``, by the names that it had before an adapter was added."""
    return {name.replace(".base_layer.", "."): tensor for name, tensor in weights.items() if ".lora_" not in name}


def load_adapter(folder: Path) -> dict[str, Tensor]:
    """What ``save_adapter`` wrote, by the module's own names. Raises CheckpointError where there is none."""
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{folder} holds no adapter ({WEIGHTS})")
    found = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        stem, _, last = name.removeprefix(_PREFIX).rpartition(".")
        found[f"{stem}.{_NAME}.{last}" if ".lora_" in name else f"{stem}.{last}"] = tensor
    return found


def base_of(folder: Path) -> str | None:
    """The model that the adapter in ``folder`` belongs to: a folder or a hub name; None where ``folder`` holds none.

    Raises CheckpointError where the adapter doesn't say.
    """
    if not (folder / CONFIG).is_file():
        return None
    base = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base:
        raise CheckpointError(f"{folder / CONFIG} doesn't say which model the adapter is for (base_model_name_or_path)")
    beside = next((above / "base" for above in folder.parents if (above / "base" / "config.json").is_file()), None)
    return str(beside) if beside is not None and Path(base).is_absolute() and not Path(base).is_dir() else str(base)


def root_of(place: str) -> str:
    """The model that stands below all adapters of ``place``, a folder or a hub name; itself where it holds none."""
    base = base_of(Path(place))
    return place if base is None else root_of(base)


def load_merged(place: str, load: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    """The model at ``place``; of an adapter's folder its base with the adapter merged, and so on down to ``load``."""
    base = base_of(Path(place))
    return load(place) if base is None else merge_adapter(load_merged(base, load), Path(place))


def is_classifier(folder: Path) -> bool:
    """Whether ``folder`` holds the adapter of a sequence classifier (a reward model)."""
    if not (folder / CONFIG).is_file():
        return False
    described: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    return described.get("task_type") == "SEQ_CLS"


def merge_adapter(module: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """``module`` with the adapter in ``folder`` added to its weights: W + alpha / rank * B A, summed in float32.

    Raises CheckpointError where they don't fit together, MissingExtra without peft.
    """
    peft = _peft()
    dtypes = {name: parameter.dtype for name, parameter in module.named_parameters()}
    described = peft.PeftConfig.from_pretrained(folder)
    if described.peft_type != peft.PeftType.LORA:
        raise CheckpointError(f"{folder} holds an adapter of type {described.peft_type.value}; only LORA can be merged")
    described.modules_to_save = None  # heads are whole weights, which no layer of peft's need hold
    try:
        tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
        _check_shared(module, tensors, folder)
        heads = {name: tensor for name, tensor in tensors.items() if ".lora_" not in name}
        cast_parameters(module, torch.float32)
        lost: list[str] = module.load_state_dict(heads, strict=False).unexpected_keys
        adapted = peft.LoraModel(module, described, _NAME)
        rest = {name: tensor for name, tensor in tensors.items() if name not in heads}
        outcome = peft.set_peft_model_state_dict(adapted.model, rest, adapter_name=_NAME)
        lost += [*outcome.unexpected_keys, *(name for name in outcome.missing_keys if ".lora_" in name)]
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"the adapter in {folder} doesn't fit its model: {error}") from error
    if lost:
        raise CheckpointError(f"the adapter in {folder} doesn't fit its model: {lost[0]!r} is on one side only")
    merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
    vars(merged).pop("peft_config", None)  # or transformers takes the module for one with an adapter
    cast_parameters(merged, dtypes)
    return merged.requires_grad_(True)


def _check_shared(module: PreTrainedModel, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Raise CheckpointError where ``tensors`` would change one use of a weight that has several: merged, all change."""
    uses: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        uses.setdefault(id(parameter), []).append(name)
    touched = {f"{name.partition('.lora_')[0]}.weight" if ".lora_" in name else name for name in tensors}
    for names in uses.values():
        found = sorted(touched.intersection(names))
        whole = [tensors[name] for name in names if name in tensors]
        is_same = len(whole) == len(names) and all(torch.equal(whole[0], tensor) for tensor in whole)
        if len(names) > 1 and found and not is_same:
            raise CheckpointError(
                f"the adapter in {folder} changes {' and '.join(found)}, and its model has one weight for "
                f"{' and '.join(names)} (tie_word_embeddings), which can't hold that: start from a model without tied "
                "weights, or from an adapter that leaves them alone"
            )


def _peft() -> Any:
    check_installed()
    return import_module("peft")


def _layers(module: nn.Module) -> Iterator[Any]:
    """peft's layers in ``module``, told by what they hold, so that peft needn't be installed to find none."""
    return (part for part in module.modules() if {"base_layer", "lora_A", "lora_B"} <= part._modules.keys())


def _linear_layers(module: PreTrainedModel) -> dict[str, nn.Module]:
    """One linear layer of the backbone for each last part of a name, such as q_proj."""
    from transformers.pytorch_utils import Conv1D

    backbone: Any = module.get_decoder()
    named = [(name, part) for name, part in backbone.named_modules() if isinstance(part, nn.Linear | Conv1D)]
    return {name.rpartition(".")[2]: part for name, part in named}
