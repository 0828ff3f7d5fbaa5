"""From the sections of a run to the objects that the loop uses.

The only place that knows which engine, network and worker make up a role. Nothing here trains.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from verl.algorithms import ALGORITHMS
from verl.algorithms.base import Algorithm
from verl.common.seeding import seed_everything
from verl.data.loader import PromptLoader
from verl.data.prompts import PromptDataset
from verl.engines.base import Engine, TrainingEngine
from verl.hybrid_engine.colocated import SharedWeights
from verl.models.attention import ATTENTION
from verl.models.causal_lm import CausalLM
from verl.models.loading import (
    compute_dtype,
    eos_token_ids,
    load_model,
)
from verl.models.networks import PolicyNetwork, ValueNetwork
from verl.observe.flops import ModelShape
from verl.rewards.runner import RewardRunner
from verl.rollout import ROLLOUT_ENGINES
from verl.trainer.inputs import Given, Inputs, load_inputs, pick_device
from verl.trainer.sections import OnPolicyRun
from verl.workers.reference import Reference
from verl.workers.rollout import Rollout
from verl.workers.trained import Actor, Critic, TrainedRole


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
    greedy: Rollout | None
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


def assemble(config: OnPolicyRun, given: Given) -> Parts:
    """Inputs, then the model: the cheap errors first."""
    disable_progress_bar()  # transformers' own bars would tear the run's
    device = pick_device(config.trainer.device)
    inputs = load_inputs(config, given)
    try:
        inputs.rewards.start()
        return _assemble(config, given, inputs, device)
    except BaseException:
        inputs.rewards.close()
        raise


def _assemble(config: OnPolicyRun, given: Given, inputs: Inputs, device: torch.device) -> Parts:
    """What needs the model."""
    tokenizer = inputs.tokenizer
    seed_everything(config.trainer.seed)
    algorithm = ALGORITHMS.load(config.algorithm.name)(config.algorithm)
    module = _policy_module(config, given, tokenizer, device)
    algorithm.rollout_rounds_apart = module.dtype != torch.float32
    own_attention = "sdpa" if module.config._attn_implementation == ATTENTION else module.config._attn_implementation
    frozen = copy.deepcopy(module).requires_grad_(False) if "reference" in algorithm.needs else None
    critic = _critic(config, copy.deepcopy(module), algorithm, device) if "critic" in algorithm.needs else None
    lm = CausalLM(module)
    actor = _actor(config, lm, algorithm, device)
    engine = _rollout_engine(config, lm, tokenizer)
    rollout = Rollout(engine, tokenizer, config.rollout.sampling(), config.trainer.group_size)
    greedy = Rollout(engine, tokenizer, config.rollout.sampling(temperature=0.0), group_size=1)
    parts = Parts(
        device=device,
        module=module,
        tokenizer=tokenizer,
        train=inputs.train,
        val=inputs.val,
        loader=PromptLoader(
            inputs.train,
            config.trainer.prompts_per_step,
            seed=config.trainer.seed,
            shuffle=config.data.shuffle,
            epochs=config.trainer.epochs if config.trainer.total_steps is None else None,
        ),
        rewards=inputs.rewards,
        algorithm=algorithm,
        rollout=rollout,
        greedy=greedy if "greedy_scores" in algorithm.needs else None,
        actor=actor,
        critic=critic,
        weights=SharedWeights(actor.engine, engine, lm.module),
        shape=ModelShape.of(module),
        own_attention=own_attention,
    )
    parts.passes = _passes(parts, _reference(config, frozen, device) if frozen is not None else None)
    return parts


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
