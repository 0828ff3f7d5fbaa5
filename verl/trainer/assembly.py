"""From the sections of an on-policy run to the objects that its loop uses. Nothing here trains."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

from verl.algorithms.base import OnPolicyAlgorithm
from verl.data.loader import Loader
from verl.data.prompts import PromptDataset, PromptRow
from verl.hybrid_engine.colocated import SharedWeights
from verl.rewards.runner import RewardRunner
from verl.trainer.inputs import Given, Inputs, load_inputs, loader_of
from verl.trainer.parts import Roles, RunParts
from verl.trainer.roles import build_roles, controller_for, recipe_of
from verl.trainer.sections import OnPolicyRun
from verl.workers.remote import RemoteWeights
from verl.workers.rollout import Rollout


@dataclass(kw_only=True)
class Parts(RunParts):
    """Everything the on-policy loop uses.

    greedy   for the algorithms that compare with a greedy response
    weights  the way of the actor's to ``rollout``
    """

    algorithm: OnPolicyAlgorithm[Any]
    train: PromptDataset
    val: PromptDataset | None
    loader: Loader[PromptRow]
    rewards: RewardRunner
    rollout: Rollout
    greedy: Rollout | None
    weights: SharedWeights | RemoteWeights

    def close(self) -> None:
        """As in RunParts; the reward's workers end too."""
        self.rewards.close()
        super().close()


def assemble(config: OnPolicyRun, given: Given) -> Parts:
    """Inputs, then the model: the cheap errors first."""
    with controller_for(config, given.model) as controller, ExitStack() as on_error:
        inputs = load_inputs(config, given)
        on_error.callback(inputs.rewards.close)
        inputs.rewards.start_workers()
        inputs.check_columns()
        inputs.rewards.start()
        recipe = replace(recipe_of(config, inputs.tokenizer), rollout=config.rollout, critic=config.critic)
        parts = _parts(config, inputs, build_roles(config, given.model, recipe, controller, inputs.reward_model))
        on_error.pop_all()
    return parts


def _parts(config: OnPolicyRun, inputs: Inputs, roles: Roles) -> Parts:
    """The roles with what the loop needs besides."""
    tokenizer, sampler = inputs.tokenizer, roles.sampler
    assert sampler is not None, "its recipe has a rollout"
    algorithm = cast(OnPolicyAlgorithm[Any], roles.actor.algorithm)
    greedy = Rollout(sampler.engine, tokenizer, config.rollout.sampling(temperature=0.0), group_size=1)
    return Parts(
        roles=roles,
        algorithm=algorithm,
        passes=_passes(roles),
        tokenizer=tokenizer,
        train=inputs.train,
        val=inputs.val,
        loader=loader_of(config, inputs.train),
        rewards=inputs.rewards,
        rollout=Rollout(sampler.engine, tokenizer, config.rollout.sampling(), config.trainer.group_size),
        greedy=greedy if "greedy_scores" in algorithm.needs else None,
        weights=sampler.weights,
    )


def _passes(roles: Roles) -> list[Any]:
    """Roles that infer a column before the update. The actor's own pass is made when somebody reads its result:
    the algorithm before its advantages, or a second update on the same batch, whose ratio isn't 1."""
    actor = roles.actor
    is_read = "old_log_probs" in actor.algorithm.needs or actor.updates_per_step > 1
    return [role for role in (actor if is_read else None, roles.reference, roles.critic) if role is not None]
