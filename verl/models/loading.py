"""A model and its tokenizer, from a folder, a hub name, a description to start from scratch, or given objects."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import model_validator
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from typing_extensions import Self

from verl.common.errors import ConfigError, DataError, VerlError
from verl.common.section import Section
from verl.models.lora import CONFIG as ADAPTER
from verl.models.lora import LoraConfig, has_adapter, load_merged, root_of
from verl.models.whole import load_whole

log = logging.getLogger(__name__)

_TOKENIZER_SIGNS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_SIGNS = ("config.json", ADAPTER, *_TOKENIZER_SIGNS)
_BELOW = ("*", "actor/model", "checkpoints/step_*/actor/model")


class ModelConfig(Section):
    """The policy's starting point."""

    path: str | None = None
    """Hugging Face folder or hub name of a causal language model."""
    scratch: dict[str, Any] | None = None
    """Instead of `path`: a transformers configuration (`model_type`, `hidden_size`, …) to initialise at random."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer, or `chars:` and the characters of a character-level one. Default: `path`."""
    amp_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; masters and moments are float32. auto: bfloat16 on CUDA, else float32."""
    trust_remote_code: bool = False
    """Allow the model folder to run its own Python code."""
    lora: LoraConfig = LoraConfig()
    """An adapter of low rank that learns in the model's place."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.scratch is None):
            raise ValueError("give exactly one of model.path and model.scratch")
        if self.scratch is not None and self.tokenizer is None:
            raise ValueError("model.scratch needs model.tokenizer: a folder, or 'chars:' and the characters to know")
        if self.scratch is not None and "model_type" not in self.scratch:
            raise ValueError("model.scratch needs the key model_type, such as llama or qwen2")
        return self


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch type that ``model.amp_dtype`` stands for on ``device``."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name == "bfloat16" and device.type == "cpu":
        log.warning("model.amp_dtype=bfloat16 on a CPU is many times slower than float32 on most processors")
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Raises DataError naming the folder and the key when there is no tokenizer in it."""
    source = config.tokenizer or config.path
    assert source is not None
    if source.startswith("chars:"):
        return character_tokenizer(source.removeprefix("chars:"))
    key = "model.tokenizer" if config.tokenizer else "model.path"
    source = _place(source, key)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # transformers raises many kinds; all mean that there is no usable tokenizer
        raise DataError(_no_tokenizer(key, source, error)) from error
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer of {key}={source!r} has no end-of-sequence token, so no response could end")
    return tokenizer


def load_model(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """A causal language model on ``device`` in ``dtype``. Scratch models draw their weights from torch's generator; of
    an adapter's folder the model that it was trained beside, with the adapter merged into its weights.

    Raises ConfigError for a wrong description, DataError for a folder that isn't there, doesn't load or lacks weights.
    """
    described = load_model_config(config, tokenizer)
    remote: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    path = None if config.path is None else _place(config.path, "model.path")
    try:
        if path is None:
            with device:  # where drawing a large model's weights is quick
                model: Any = AutoModelForCausalLM.from_config(described, dtype=dtype, **remote)
        else:
            model = load_merged(path, partial(load_whole, AutoModelForCausalLM, dtype=dtype, **remote))
            if has_adapter(model):
                raise ConfigError(f"model.path={path!r} is an adapter on the hub: download it, and give the folder")
    except DataError as error:
        raise _unusable(config, error) from error
    except VerlError:
        raise
    except Exception as error:  # of many libraries' kinds; memory that runs out is no fault of the folder
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise
        raise _unusable(config, error) from error
    moved: PreTrainedModel = model.to(device)
    return moved


def outline_of(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The model without its weights: shapes only, on torch's meta device. Raises as ``load_model``."""
    described = load_model_config(config, tokenizer)
    with torch.device("meta"):
        made: PreTrainedModel = AutoModelForCausalLM.from_config(described, trust_remote_code=config.trust_remote_code)
    return made


def load_model_config(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """The model's transformers configuration, without its weights. Raises as ``load_model``."""
    try:
        if config.path is None:
            return _scratch_config(config.scratch or {}, tokenizer)
        path = root_of(_place(config.path, "model.path"))
        found: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        return found
    except VerlError:
        raise
    except Exception as error:  # a configuration's own checks raise what they like
        raise _unusable(config, error) from error


def position_limits(config: PretrainedConfig) -> dict[str, int]:
    """Positions that a row may take, by the key of the transformers configuration that says so.

    "longrope" turns all rows of a batch by other angles as soon as one of them is longer than its original length.
    """
    text = config.get_text_config()
    limits: dict[str, int] = {}
    if (positions := getattr(text, "max_position_embeddings", None)) is not None:
        limits["max_position_embeddings"] = int(positions)
    rope = getattr(text, "rope_parameters", None) or {}
    for kind in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
        if kind.get("rope_type") == "longrope":
            limits["original_max_position_embeddings of longrope"] = int(kind["original_max_position_embeddings"])
    return limits


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a response: the tokenizer's, the configuration's and the generation configuration's.

    These are facts of the model's vocabulary; nothing else of generation_config.json is used.
    """
    ids: set[int] = set()
    for found in (tokenizer.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id):
        ids.update(found if isinstance(found, list | tuple) else [] if found is None else [found])
    return tuple(sorted(ids))


def character_tokenizer(characters: str) -> PreTrainedTokenizerBase:
    """One token a character, besides ``<pad>``=0, which loaders of data refuse to read others as, and ``<eos>``=1."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if len(set(characters)) != len(characters) or not characters:
        raise ConfigError(f"model.tokenizer='chars:…' needs distinct characters, got {characters!r}")
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *characters])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    inner.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")
    made.name_or_path = f"chars:{characters}"
    return made


def _scratch_config(description: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    keys = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        **description,
    }
    made: PretrainedConfig = AutoConfig.for_model(keys.pop("model_type"), **keys)
    return made


def _unusable(config: ModelConfig, error: Exception) -> VerlError:
    said = str(error) if isinstance(error, VerlError) else f"{type(error).__name__}: {error}"
    if config.path is not None:
        return DataError(f"model.path={config.path!r} doesn't load as a causal language model: {said}")
    return ConfigError(f"model.scratch doesn't describe a {(config.scratch or {})['model_type']!r} model: {said}")


def _no_tokenizer(key: str, source: str, error: Exception) -> str:
    if not Path(source).is_dir():
        return (
            f"{key}={source!r} is no folder here, and the hub gave no tokenizer of that name: {error} Set {key} to a "
            "folder that is there, or to a hub name that can be reached"
        )
    is_there = any((Path(source) / name).exists() for name in _TOKENIZER_SIGNS)
    why = str(error).rstrip(".") if is_there else f"none of {', '.join(_TOKENIZER_SIGNS)} is in it"
    return f"{key}={source!r} holds no tokenizer that loads: {why}. Set model.tokenizer to a folder or hub name of one"


def _place(source: str, key: str) -> str:
    """``source`` for transformers: a folder's path, ``~`` expanded, or a hub name. Raises DataError for no folder."""
    path = Path(source).expanduser()
    looks_local = source.startswith((".", "/", "~")) or path.exists()
    if looks_local and not path.is_dir():
        raise DataError(f"{key}={source!r} is no folder")
    if not looks_local and source.count("/") > 1:
        raise DataError(f"{key}={source!r} is no folder here, and no hub name either, which has one slash at most")
    if looks_local and not any((path / name).exists() for name in _SIGNS) and (below := _models_below(path)):
        raise DataError(f"{key}={source!r} is no model folder itself; there is one below it: {str(below[-1])!r}")
    return str(path) if looks_local else source


def _models_below(folder: Path) -> list[Path]:
    """Model folders where a run or a checkpoint has them, or just below; newest last."""
    names = ("config.json", ADAPTER)
    return [path.parent for depth in _BELOW for name in names for path in sorted(folder.glob(f"{depth}/{name}"))]
