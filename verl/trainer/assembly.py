"""From the sections of an on-policy run to the objects that its loop uses. Nothing here trains."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from verl.algorithms.base import OnPolicyAlgorithm
from verl.data.loader import Loader
from verl.data.prompts import PromptDataset, PromptRow
from verl.hybrid_engine.colocated import SharedWeights
from verl.rewards.runner import RewardRunner
from verl.trainer.inputs import Given, Inputs, load_inputs, loader_of, pick_device
from verl.trainer.parts import RunParts
from verl.trainer.roles import Roles, build_roles, check_placement, controller_for
from verl.trainer.sections import OnPolicyRun
from verl.workers.recipe import Recipe
from verl.workers.reference import Reference
from verl.workers.remote import RemoteWeights
from verl.workers.rollout import Rollout
from verl.workers.trained import Critic, TrainedRole


@dataclass(kw_only=True)
class Parts(RunParts):
    """Everything the on-policy loop uses."""

    train: PromptDataset
    loader: Loader[PromptRow]
    algorithm: OnPolicyAlgorithm[Any]
    val: PromptDataset | None
    rewards: RewardRunner
    rollout: Rollout
    greedy: Rollout | None
    critic: Critic | None
    weights: SharedWeights | RemoteWeights

    @property
    def trained_roles(self) -> list[TrainedRole]:
        """The actor, and the critic where there is one."""
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    def close(self) -> None:
        """As in RunParts; the reward's workers end too."""
        self.rewards.close()
        super().close()


def assemble(config: OnPolicyRun, given: Given) -> Parts:
    """Inputs, then the model: the cheap errors first."""
    disable_progress_bar()  # transformers' own bars would tear the run's
    check_placement(config, given.model)
    device = pick_device(config.trainer.device)
    with controller_for(config.placement) as controller, ExitStack() as on_error:
        inputs = load_inputs(config, given)
        on_error.callback(inputs.rewards.close)
        inputs.rewards.start()
        recipe = _recipe(config, inputs.tokenizer)
        parts = _parts(
            config, inputs, build_roles(config, given.model, recipe, device, controller, inputs.reward_model)
        )
        on_error.pop_all()
    return parts


def _recipe(config: OnPolicyRun, tokenizer: PreTrainedTokenizerBase) -> Recipe:
    return Recipe(
        model=config.model,
        tokenizer=tokenizer,
        algorithm=config.algorithm,
        rollout=config.rollout,
        actor=config.actor,
        critic=config.critic,
        reference=config.reference,
        seed=config.trainer.seed,
    )


def _parts(config: OnPolicyRun, inputs: Inputs, roles: Roles) -> Parts:
    """The roles with what the loop needs besides."""
    trainer, tokenizer, sampler = config.trainer, inputs.tokenizer, roles.sampler
    assert sampler is not None, "its recipe has a rollout"
    algorithm = cast(OnPolicyAlgorithm[Any], roles.algorithm)
    greedy = Rollout(sampler.engine, tokenizer, config.rollout.sampling(temperature=0.0), group_size=1)
    parts = Parts(
        device=roles.device,
        module=roles.module,
        tokenizer=tokenizer,
        train=inputs.train,
        val=inputs.val,
        loader=loader_of(config, inputs.train),
        rewards=inputs.rewards,
        algorithm=algorithm,
        rollout=Rollout(sampler.engine, tokenizer, config.rollout.sampling(), trainer.group_size),
        greedy=greedy if "greedy_scores" in algorithm.needs else None,
        actor=roles.actor,
        critic=roles.critic,
        weights=sampler.weights,
        shape=roles.shape,
        compute=roles.compute,
        own_attention=roles.own_attention,
        controller=roles.controller,
        groups=roles.groups,
        tracers=roles.tracers,
    )
    parts.passes = _passes(parts, roles.reference)
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
