"""What a run is given: sections and objects from Python, rewards, prompts, a device; each checked before a model loads.

In come the words and objects of ``PPOTrainer`` or of a config file, out go validated sections and loaded data. Knows
nothing of engines, roles or the loop.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from verl.common.errors import ConfigError, DataError, VerlError
from verl.data.loader import Loader, RowT
from verl.data.prompts import PromptDataset, load_prompts, shared_prompts
from verl.models.loading import ModelConfig, load_model_config, load_tokenizer, position_limits
from verl.rewards.base import RewardItem
from verl.rewards.runner import RewardRunner
from verl.trainer.base_sections import GIVEN, Run
from verl.trainer.reward_folder import NamedRewardModel
from verl.trainer.sections import OnPolicyRun

log = logging.getLogger(__name__)


@dataclass
class Given:
    """Objects passed in Python in place of names."""

    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    train: Any = None
    val: Any = None
    reward: Any = None


def sections_of(
    *, model: Any, data: Any, reward: Any, tokenizer: Any, val: Any, algorithm: Any, **sections: Any
) -> tuple[OnPolicyRun, Given]:
    """The validated sections of an on-policy run and whatever was given as an object. Raises ConfigError."""
    keys, given = given_sections(model, tokenizer, data, val)
    reward_section = dict(reward) if isinstance(reward, Mapping) else reward_keys(reward)
    if not isinstance(reward_section.get("function", ""), str):
        given.reward = reward_section.pop("function")
    return OnPolicyRun.parse({**keys, "reward": reward_section, "algorithm": algorithm, **sections}), given


def given_sections(model: Any, tokenizer: Any, data: Any, val: Any) -> tuple[dict[str, Any], Given]:
    """The model and data sections that every run has, and whatever was given as an object. Raises ConfigError."""
    given = Given()
    keys = {"model": _model_keys(model, tokenizer, given), "data": _data_keys(data, val, given)}
    return keys, given


def _model_keys(model: Any, tokenizer: Any, given: Given) -> dict[str, Any]:
    model_keys = dict(model) if isinstance(model, Mapping) else {"path": str(model)}
    module = model_keys["path"] if isinstance(model, Mapping) and "path" in model else model
    if isinstance(module, PreTrainedModel):
        given.model = module
        model_keys = {**(model_keys if isinstance(model, Mapping) else {}), "path": GIVEN}
    elif not isinstance(model, str | PathLike | Mapping):
        raise ConfigError(
            "model must be a folder or hub name, a transformers module (PreTrainedModel) or the keys of the model "
            f"section, whose path may be any of them, got {type(model).__name__}"
        )
    if isinstance(tokenizer, str | PathLike):
        model_keys["tokenizer"] = str(tokenizer)
    elif tokenizer is not None:
        given.tokenizer = tokenizer
        model_keys["tokenizer"] = GIVEN
    elif given.model is not None:
        raise ConfigError("a model given as an object needs tokenizer=: the tokenizer or a folder that holds it")
    return model_keys


def _data_keys(data: Any, val: Any, given: Given) -> dict[str, Any]:
    data_keys = dict(data) if isinstance(data, Mapping) else {"train": data}
    if val is not None:
        data_keys["val"] = val
    for key in ("train", "val"):
        if data_keys.get(key) is not None and not _is_named(data_keys[key]):
            setattr(given, key, data_keys[key])
            data_keys[key] = GIVEN
    return data_keys


@dataclass(frozen=True)
class Inputs:
    """What a run needs beside its model, loaded and checked against the model's configuration.

    reward_model  behind ``rewards``, where the config names one
    """

    rewards: RewardRunner
    reward_model: NamedRewardModel | None
    tokenizer: PreTrainedTokenizerBase
    train: PromptDataset
    val: PromptDataset | None

    def check_columns(self) -> None:
        """``check_columns`` of all prompts; the reward's workers run by now."""
        for key, prompts in (("data.train", self.train), ("data.val", self.val)):
            if prompts is not None:
                check_columns(self.rewards, prompts, key)


def load_inputs(config: OnPolicyRun, given: Given) -> Inputs:
    """Everything that can be wrong before a model is loaded, the cheap first. The reward's workers don't run yet.

    Raises ConfigError, DataError, MissingExtra.
    """
    config.track.check_installed()
    tokenizer = given.tokenizer or load_tokenizer(config.model)
    model = reward_model(config, tokenizer) if given.reward is None else None
    rewards = reward_runner(config, model or given.reward)
    train, val = load_data(config, given, tokenizer)
    hf_config = given.model.config if given.model is not None else load_model_config(config.model, tokenizer)
    check_lengths(hf_config, config, train, val)
    return Inputs(rewards, model, tokenizer, train, val)


def reward_model(config: OnPolicyRun, tokenizer: PreTrainedTokenizerBase) -> NamedRewardModel | None:
    """The model that the config names, not loaded yet. Raises DataError and UnsupportedModel."""
    if config.reward.model is None:
        return None
    is_here = config.placement.kind == "inprocess"
    return NamedRewardModel(config.reward.model, tokenizer, pick_device(config.trainer.device) if is_here else None)


def reward_runner(config: OnPolicyRun, reward: Any) -> RewardRunner:
    """The runner of the run's one reward, None for that of the config. Raises ConfigError when there is none or it
    can't be loaded here."""
    try:
        return RewardRunner(reward, config.reward)
    except VerlError:
        raise
    except (Exception, SystemExit) as error:  # a user's module, loaded in this process
        raise ConfigError(f"the reward's function can't be loaded: {type(error).__name__}: {error}") from error


def reward_keys(reward: Any) -> dict[str, Any]:
    """A reward written as one word, or a callable, as keys: ``file.py:function``, ``module:function`` or a name."""
    is_name = isinstance(reward, str) and ":" not in reward
    return {"name": reward} if is_name else {"function": reward}


def check_columns(rewards: RewardRunner, prompts: PromptDataset, key: str) -> None:
    """Raise DataError where the reward, whose workers run, can't be called without a column that ``prompts``, those of
    ``key``, don't have."""
    row = prompts[0]  # every row has the columns of all
    fields = {*RewardItem(prompt=row.prompt, response="", row=row.as_mapping()).fields(), "prompt_ids", "response_ids"}
    if missing := sorted(rewards.needs - fields):
        raise DataError(
            f"{key}: the reward needs {', '.join(map(repr, missing))}, and the rows of {row.source!r} have no such "
            f"column; they have {', '.join(map(repr, sorted(fields)))}. Use data with the column, or another reward"
        )


def load_data(
    config: OnPolicyRun, given: Given, tokenizer: PreTrainedTokenizerBase
) -> tuple[PromptDataset, PromptDataset | None]:
    """Training and validation prompts."""
    data = config.data
    source = data.train if given.train is None else given.train
    train = load_prompts(source, data, tokenizer, max_rows=data.max_train_rows)
    if data.val is None:
        return train, None
    source = data.val if given.val is None else given.val
    val = load_prompts(source, data, tokenizer, key="data.val", max_rows=data.max_val_rows)
    if data.exclude_val:
        train = train.without(val)
    elif shared := shared_prompts(train, val):
        log.warning(
            "%d of %d validation prompts are training prompts too, such as row %d; data.exclude_val=true leaves them "
            "out of training",
            len(shared),
            len(val),
            shared[0],
        )
    return train, val


def check_lengths(
    hf_config: PretrainedConfig, config: OnPolicyRun, train: PromptDataset, val: PromptDataset | None
) -> None:
    """Raise ConfigError when the longest prompt and a whole response are more than the model has positions, or when a
    prompt has an id beyond its vocabulary."""
    for key, prompts in (("train", train), ("val", val)):
        for row in prompts or ():
            check_vocabulary(
                hf_config, config.model, max(row.prompt_ids), f"row {row.row_id} of data.{key} ({row.source})"
            )
    longest, key = max((len(row.prompt_ids), k) for k, rows in (("val", val), ("train", train)) for row in rows or ())
    total = longest + config.rollout.max_response_tokens
    for name, limit in position_limits(hf_config).items():
        if total > limit:
            raise ConfigError(
                f"the longest prompt of data.{key} has {longest} tokens, and with rollout.max_response_tokens="
                f"{config.rollout.max_response_tokens} needs {total} positions; the model has {limit} ({name}). Lower "
                f"rollout.max_response_tokens, or data.max_prompt_tokens (now {config.data.max_prompt_tokens})"
            )


def check_vocabulary(hf_config: PretrainedConfig, model: ModelConfig, largest: int, where: str) -> None:
    """Raise ConfigError when ``largest``, the largest token id of the row ``where``, is beyond the model's."""
    size = getattr(hf_config.get_text_config(), "vocab_size", None)
    if size is not None and largest >= size:
        raise ConfigError(
            f"{where} has the token id {largest}, and the model knows {size} tokens (vocab_size): "
            f"{model.tokenizer or model.path!r} (model.tokenizer) holds another model's tokenizer"
        )


def loader_of(config: Run, rows: Sequence[RowT]) -> Loader[RowT]:
    """The training rows in the run's order; without end where it has a number of steps."""
    trainer = config.trainer
    epochs = trainer.epochs if trainer.total_steps is None else None
    return Loader(rows, trainer.rows_per_batch, seed=trainer.seed, shuffle=config.data.shuffle, epochs=epochs)


def pick_device(name: str) -> torch.device:
    """The torch device that ``trainer.device`` names. Raises ConfigError where there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"trainer.device={name!r} is no device: auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"trainer.device={name!r}, but torch sees no CUDA device. Set trainer.device=cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"trainer.device={name!r}, but there are {torch.cuda.device_count()} CUDA devices, from cuda:0"
        )
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"trainer.device={name!r} isn't supported: auto, cpu, cuda or cuda:N")
    return device


def _is_named(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list | tuple) and all(isinstance(v, str) for v in value))
