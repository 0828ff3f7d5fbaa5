"""From the sections of a run to the objects that the loop uses.

The only place that knows which engine, network and worker make up a role. Nothing here trains.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, cast

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from verl.algorithms import ALGORITHMS
from verl.algorithms.base import Algorithm
from verl.common.errors import ConfigError, VerlError
from verl.common.seeding import seed_everything
from verl.data.loader import PromptLoader
from verl.data.prompts import PromptDataset, load_prompts, shared_prompts
from verl.engines.base import Engine, TrainingEngine
from verl.hybrid_engine.colocated import SharedWeights
from verl.models.attention import ATTENTION
from verl.models.causal_lm import CausalLM
from verl.models.loading import (
    compute_dtype,
    eos_token_ids,
    load_model,
    load_model_config,
    load_tokenizer,
    position_limits,
)
from verl.models.networks import PolicyNetwork, ValueNetwork
from verl.observe.flops import ModelShape
from verl.rewards.runner import RewardRunner
from verl.rollout import ROLLOUT_ENGINES
from verl.trainer.sections import GIVEN, OnPolicyRun
from verl.workers.reference import Reference
from verl.workers.rollout import Rollout
from verl.workers.trained import Actor, Critic, TrainedRole

log = logging.getLogger(__name__)


@dataclass
class Given:
    """Objects passed in Python in place of names."""

    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    train: Any = None
    val: Any = None
    reward: Any = None


@dataclass
class Parts:
    """Everything the loop uses."""

    device: torch.device
    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    train: PromptDataset
    val: PromptDataset | None
    loader: PromptLoader
    rewards: RewardRunner
    algorithm: Algorithm[Any]
    rollout: Rollout
    actor: Actor
    critic: Critic | None
    weights: SharedWeights
    shape: ModelShape
    own_attention: str
    passes: list[Any] = field(default_factory=list)

    def take_model(self) -> None:
        """Run the policy's module under this library's attention."""
        cast(Any, self.module).set_attn_implementation(ATTENTION)

    def give_model_back(self) -> None:
        """Leave the module as its owner knows it: ``generate`` and plain calls work again."""
        cast(Any, self.module).set_attn_implementation(self.own_attention)

    @property
    def trained(self) -> list[TrainedRole]:
        """Roles that learn, in the order that the algorithm declares."""
        roles: dict[str, TrainedRole | None] = {"actor": self.actor, "critic": self.critic}
        return [role for name in self.algorithm.trains if (role := roles[name]) is not None]


def sections_of(
    *, model: Any, data: Any, reward: Any, tokenizer: Any, val: Any, algorithm: Any, **sections: Any
) -> tuple[OnPolicyRun, Given]:
    """The validated sections and whatever was given as an object. Raises ConfigError."""
    given = Given()
    model_keys = dict(model) if isinstance(model, Mapping) else {"path": str(model)}
    if isinstance(model, torch.nn.Module):
        given.model = cast(PreTrainedModel, model)
        model_keys = {"path": GIVEN}
    elif not isinstance(model, str | PathLike | Mapping):
        raise ConfigError(
            "model must be a folder or hub name, a transformers module or the keys of the model section, "
            f"got {type(model).__name__}"
        )
    if isinstance(tokenizer, str | PathLike):
        model_keys["tokenizer"] = str(tokenizer)
    elif tokenizer is not None:
        given.tokenizer = tokenizer
        model_keys["tokenizer"] = GIVEN
    elif isinstance(model, torch.nn.Module):
        raise ConfigError("a model given as an object needs tokenizer=: the tokenizer or a folder that holds it")
    data_keys = dict(data) if isinstance(data, Mapping) else {"train": data}
    if val is not None:
        data_keys["val"] = val
    for key in ("train", "val"):
        if data_keys.get(key) is not None and not _is_named(data_keys[key]):
            setattr(given, key, data_keys[key])
            data_keys[key] = GIVEN
    reward_section = dict(reward) if isinstance(reward, Mapping) else reward_keys(reward)
    if not isinstance(reward_section.get("function", ""), str):
        given.reward = reward_section.pop("function")
    keys = {"model": model_keys, "data": data_keys, "reward": reward_section, "algorithm": algorithm, **sections}
    keys.setdefault("rollout", {"name": "native"})
    return OnPolicyRun.parse(keys), given


def assemble(config: OnPolicyRun, given: Given) -> Parts:
    """Load data before the model: the cheap errors first."""
    disable_progress_bar()  # transformers' own bars would tear the run's
    device = pick_device(config.trainer.device)
    config.track.check_installed()
    rewards = reward_runner(config, given)
    tokenizer = given.tokenizer or load_tokenizer(config.model)
    train, val = load_data(config, given, tokenizer)
    hf_config = given.model.config if given.model is not None else load_model_config(config.model, tokenizer)
    check_lengths(hf_config, config, train, val)
    try:
        rewards.start()
        return _assemble(config, given, device, tokenizer, train, val, rewards)
    except BaseException:
        rewards.close()
        raise


def _assemble(
    config: OnPolicyRun,
    given: Given,
    device: torch.device,
    tokenizer: PreTrainedTokenizerBase,
    train: PromptDataset,
    val: PromptDataset | None,
    rewards: RewardRunner,
) -> Parts:
    """What needs the model."""
    seed_everything(config.trainer.seed)
    algorithm = ALGORITHMS.load(config.algorithm.name)(config.algorithm)
    module = _policy_module(config, given, tokenizer, device)
    own_attention = "sdpa" if module.config._attn_implementation == ATTENTION else module.config._attn_implementation
    frozen = copy.deepcopy(module).requires_grad_(False) if "reference" in algorithm.needs else None
    critic = _critic(config, copy.deepcopy(module), algorithm, device) if "critic" in algorithm.needs else None
    lm = CausalLM(module)
    actor = _actor(config, lm, algorithm, device)
    engine = _rollout_engine(config, lm, tokenizer)
    rollout = Rollout(engine, tokenizer, config.rollout.sampling(), config.trainer.group_size)
    parts = Parts(
        device=device,
        module=module,
        tokenizer=tokenizer,
        train=train,
        val=val,
        loader=PromptLoader(
            train,
            config.trainer.prompts_per_step,
            seed=config.trainer.seed,
            shuffle=config.data.shuffle,
            epochs=config.trainer.epochs if config.trainer.total_steps is None else None,
        ),
        rewards=rewards,
        algorithm=algorithm,
        rollout=rollout,
        actor=actor,
        critic=critic,
        weights=SharedWeights(actor.engine, engine, lm.module),
        shape=ModelShape.of(module),
        own_attention=own_attention,
    )
    parts.passes = _passes(parts, _reference(config, frozen, device) if frozen is not None else None)
    return parts


def reward_runner(config: OnPolicyRun, given: Given) -> RewardRunner:
    """The runner of the run's one reward. Raises ConfigError when there is none or it can't be loaded here."""
    try:
        return RewardRunner(config.reward if given.reward is None else given.reward, config.reward)
    except VerlError:
        raise
    except Exception as error:  # a user's module, loaded in this process
        raise ConfigError(f"the reward's function can't be loaded: {type(error).__name__}: {error}") from error


def reward_keys(reward: Any) -> dict[str, Any]:
    """A reward written as one word, or a callable, as keys: ``file.py:function``, ``module:function`` or a name."""
    is_name = isinstance(reward, str) and ":" not in reward
    return {"name": reward} if is_name else {"function": reward}


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
    """Raise ConfigError when the longest prompt and a whole response are more than the model has positions."""
    longest, key = max((len(row.prompt_ids), k) for k, rows in (("val", val), ("train", train)) for row in rows or ())
    total = longest + config.rollout.max_response_tokens
    for name, limit in position_limits(hf_config).items():
        if total > limit:
            raise ConfigError(
                f"the longest prompt of data.{key} has {longest} tokens, and with rollout.max_response_tokens="
                f"{config.rollout.max_response_tokens} needs {total} positions; the model has {limit} ({name}). Lower "
                f"rollout.max_response_tokens, or data.max_prompt_tokens (now {config.data.max_prompt_tokens})"
            )


def _passes(parts: Parts, reference: Reference | None) -> list[Any]:
    """Roles that infer a column before the update. The actor's own pass is made when somebody reads its result:
    the algorithm before its advantages, or a second update on the same batch, whose ratio isn't 1."""
    passes: list[Any] = []
    if "old_log_probs" in parts.algorithm.needs or parts.actor.updates_per_step > 1:
        passes.append(parts.actor)
    if reference is not None:
        passes.append(reference)
    if parts.critic is not None:
        passes.append(parts.critic)
    return passes


def _policy_module(
    config: OnPolicyRun, given: Given, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> PreTrainedModel:
    dtype = compute_dtype(config.model.amp_dtype, device)
    if given.model is not None:
        moved: PreTrainedModel = cast(Any, given.model).to(device=device, dtype=dtype)
        return moved
    return load_model(config.model, tokenizer, device, dtype)


def _actor(config: OnPolicyRun, lm: CausalLM, algorithm: Algorithm[Any], device: torch.device) -> Actor:
    network = PolicyNetwork(lm, config.rollout.temperature)
    engine = TrainingEngine(network, config.actor, device, "actor")
    return Actor(engine, config.actor, algorithm, config.trainer.seed)


def _critic(config: OnPolicyRun, module: PreTrainedModel, algorithm: Algorithm[Any], device: torch.device) -> Critic:
    engine = TrainingEngine(ValueNetwork(module), config.critic, device, "critic")
    return Critic(engine, config.critic, algorithm, config.trainer.seed)


def _reference(config: OnPolicyRun, module: PreTrainedModel, device: torch.device) -> Reference:
    return Reference(Engine(PolicyNetwork(CausalLM(module), config.rollout.temperature), config.reference, device))


def _rollout_engine(config: OnPolicyRun, lm: CausalLM, tokenizer: PreTrainedTokenizerBase) -> Any:
    build: Callable[..., Any] = ROLLOUT_ENGINES.load(config.rollout.name)
    return build(lm, tokenizer, config.rollout, eos_token_ids(lm.module, tokenizer))


def _is_named(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list | tuple) and all(isinstance(v, str) for v in value))


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
