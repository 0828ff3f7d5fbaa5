"""From the sections of a run to the objects that the loop uses.

The only place that knows which engine, network and worker make up a role. Nothing here trains.
"""

from __future__ import annotations

import copy
import logging
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from verl.algorithms.base import Algorithm
from verl.common.errors import ConfigError
from verl.common.seeding import seed_everything
from verl.controller import Controller, ResourcePool, WorkerGroup
from verl.data.loader import PromptLoader
from verl.data.prompts import PromptDataset
from verl.engines.mesh import Mesh, ParallelConfig
from verl.engines.parallel import check_cuts
from verl.hybrid_engine.colocated import SharedWeights
from verl.models.attention import ATTENTION
from verl.models.causal_lm import CausalLM
from verl.models.loading import compute_dtype, outline_of
from verl.models.networks import PolicyNetwork
from verl.observe.flops import ModelShape
from verl.observe.memory import peak_memory_bytes, reset_peak_memory
from verl.rewards.runner import RewardRunner
from verl.trainer.inputs import Given, Inputs, load_inputs, pick_device
from verl.trainer.measures import Compute
from verl.trainer.placement import PlacementConfig, launched_ranks, layout_of
from verl.trainer.sections import OnPolicyRun
from verl.workers.recipe import Recipe
from verl.workers.reference import Reference
from verl.workers.remote import RemoteEngine, RemoteRollout, RemoteWeights
from verl.workers.rollout import Rollout
from verl.workers.served import EngineWorker, RolloutWorker
from verl.workers.trained import Actor, Critic, TrainedRole

log = logging.getLogger(__name__)


@dataclass
class Parts:
    """Everything the loop uses.

    module      the policy's own, under this library's attention while a trainer runs; None where workers hold it
    compute     what the actor trains on
    controller  of the workers; None where all is in this process
    groups      of the workers
    """

    device: torch.device
    module: PreTrainedModel | None
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
    weights: SharedWeights | RemoteWeights
    shape: ModelShape
    compute: Compute
    own_attention: str = ""
    controller: Controller | None = None
    groups: list[WorkerGroup] = field(default_factory=list)
    passes: list[Any] = field(default_factory=list)

    def take_model(self) -> None:
        """Run the policy's module under this library's attention."""
        if self.module is not None:
            cast(Any, self.module).set_attn_implementation(ATTENTION)

    def give_model_back(self) -> None:
        """Leave the module as its owner knows it: ``generate`` and plain calls work again. Workers end."""
        if self.module is not None:
            cast(Any, self.module).set_attn_implementation(self.own_attention)
        if self.controller is not None:
            self.controller.close()

    def peak_memory_bytes(self) -> int:
        """Most memory of one process that runs models, since the last call where it's a GPU's; begins a new peak."""
        if self.groups:
            asked = [group.peak_memory_bytes() for group in self.groups]
            peaks: list[int] = [peak for handle in asked for peak in handle.get()]
            return max(peaks)
        peak = peak_memory_bytes(self.device)
        reset_peak_memory(self.device)
        return peak

    @property
    def trained_roles(self) -> list[Actor | Critic]:
        """Roles with weights that a checkpoint holds."""
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    @property
    def trained(self) -> list[TrainedRole]:
        """Roles that learn, in the order that the algorithm declares."""
        roles: dict[str, TrainedRole | None] = {"actor": self.actor, "critic": self.critic}
        return [role for name in self.algorithm.trains if (role := roles[name]) is not None]


@dataclass
class _Roles:
    """The roles that run models, wherever they are, and what comes with them."""

    device: torch.device
    module: PreTrainedModel | None
    algorithm: Algorithm[Any]
    engine: Any
    actor: Actor
    critic: Critic | None
    reference: Reference | None
    weights: SharedWeights | RemoteWeights
    shape: ModelShape
    compute: Compute
    own_attention: str = ""
    controller: Controller | None = None
    groups: list[WorkerGroup] = field(default_factory=list)


def assemble(config: OnPolicyRun, given: Given) -> Parts:
    """Inputs, then the model: the cheap errors first."""
    disable_progress_bar()  # transformers' own bars would tear the run's
    is_here = config.placement.kind == "inprocess"
    if not is_here and given.model is not None:
        raise ConfigError(
            f"a model given as an object can't go to the workers of placement.executor={config.placement.kind}: save "
            "it with save_pretrained and give the folder, or set placement.executor=inprocess"
        )
    device = pick_device(config.trainer.device)
    with ExitStack() as on_error:
        controller = None
        if not is_here:  # first of all: other ranks wait for it, while data may take minutes
            controller = on_error.enter_context(_controller(config.placement))
        inputs = load_inputs(config, given)
        on_error.callback(inputs.rewards.close)
        inputs.rewards.start()
        seed_everything(config.trainer.seed)
        recipe = _recipe(config, inputs.tokenizer)
        if controller is None:
            roles = _roles_here(config, given, recipe, device)
        else:
            roles = _roles_on_workers(config, recipe, controller)
        parts = _parts(config, inputs, roles)
        on_error.pop_all()
    return parts


def _controller(placement: PlacementConfig) -> Controller:
    if idle := placement.idle_ranks:
        log.warning(
            "torchrun started %d processes, and ranks %s have no role: start fewer, or raise placement.devices",
            launched_ranks(),
            idle,
        )
    return Controller(placement.kind, call_timeout_s=placement.call_timeout_s)


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


def _roles_here(config: OnPolicyRun, given: Given, recipe: Recipe, device: torch.device) -> _Roles:
    """All roles in this process, the rollout on the very weights that the actor trains."""
    module = _policy_module(given, recipe, device)
    algorithm = recipe.make_algorithm(module.dtype)
    own_attention = "sdpa" if module.config._attn_implementation == ATTENTION else module.config._attn_implementation
    single = Mesh.build(config.actor.parallel, device.type)
    frozen = copy.deepcopy(module) if "reference" in algorithm.needs else None
    critic = (
        recipe.make_critic(copy.deepcopy(module), algorithm, device, Mesh.build(config.critic.parallel, device.type))
        if "critic" in algorithm.needs
        else None
    )
    lm = CausalLM(module)
    actor = recipe.make_actor(lm, algorithm, device, single)
    engine = recipe.make_rollout(lm)
    reference = None
    if frozen is not None:
        reference = recipe.make_reference(frozen, device, Mesh.build(config.reference.parallel, device.type))
    return _Roles(
        device=device,
        module=module,
        algorithm=algorithm,
        engine=engine,
        actor=actor,
        critic=critic,
        reference=reference,
        weights=SharedWeights(actor.engine, engine, lm.module),
        shape=ModelShape.of(module),
        compute=Compute(device, 1),
        own_attention=own_attention,
    )


def _roles_on_workers(config: OnPolicyRun, recipe: Recipe, controller: Controller) -> _Roles:
    """A worker group for each role, on the devices that ``placement`` names, and what stands for it here."""
    placement, seed = config.placement, config.trainer.seed
    outline = PolicyNetwork(CausalLM(outline_of(config.model, recipe.tokenizer)))
    kind: Any = {"auto": None, "cpu": "cpu"}.get(config.trainer.device, "cuda")
    pools: dict[tuple[int, ...], ResourcePool] = {}

    def pool(role: str) -> ResourcePool:
        devices = placement.devices_of(role)
        return pools.setdefault(devices, ResourcePool(devices, nodes=placement.nodes, kind=kind))

    def group(role: str, parallel: ParallelConfig) -> WorkerGroup:
        check_cuts(outline, parallel)
        return controller.group(role, EngineWorker, pool(role), layout_of(parallel), role=role, recipe=recipe)

    actor_group = group("actor", config.actor.parallel)
    device_name = actor_group.device_name().get()
    device_type = "cpu" if device_name == "cpu" else "cuda"
    algorithm = recipe.make_algorithm(compute_dtype(config.model.amp_dtype, torch.device(device_type)))
    actor_engine = RemoteEngine(actor_group, algorithm, Actor.writes)
    actor = Actor(cast(Any, actor_engine), config.actor, algorithm, seed)
    groups, critic, reference = [actor_group], None, None
    if "critic" in algorithm.needs:
        groups.append(group("critic", config.critic.parallel))
        critic = Critic(cast(Any, RemoteEngine(groups[-1], algorithm, Critic.writes)), config.critic, algorithm, seed)
    if "reference" in algorithm.needs:
        groups.append(group("reference", config.reference.parallel))
        reference = Reference(cast(Any, RemoteEngine(groups[-1], algorithm, Reference.writes)))
    groups.append(controller.group("rollout", RolloutWorker, pool("rollout"), recipe=recipe))
    rollout = RemoteRollout(groups[-1])
    weights = RemoteWeights(actor_engine, rollout, is_colocated=pool("rollout") is pool("actor"))
    weights.set_version(0)
    return _Roles(
        device=torch.device("cpu"),
        module=None,
        algorithm=algorithm,
        engine=rollout,
        actor=actor,
        critic=critic,
        reference=reference,
        weights=weights,
        shape=ModelShape.of(outline.module),
        compute=Compute(device_name, actor_group.grid.world_size),
        controller=controller,
        groups=groups,
    )


def _parts(config: OnPolicyRun, inputs: Inputs, roles: _Roles) -> Parts:
    """The roles with what the loop needs besides."""
    trainer, tokenizer = config.trainer, inputs.tokenizer
    greedy = Rollout(roles.engine, tokenizer, config.rollout.sampling(temperature=0.0), group_size=1)
    parts = Parts(
        device=roles.device,
        module=roles.module,
        tokenizer=tokenizer,
        train=inputs.train,
        val=inputs.val,
        loader=PromptLoader(
            inputs.train,
            trainer.prompts_per_step,
            seed=trainer.seed,
            shuffle=config.data.shuffle,
            epochs=trainer.epochs if trainer.total_steps is None else None,
        ),
        rewards=inputs.rewards,
        algorithm=roles.algorithm,
        rollout=Rollout(roles.engine, tokenizer, config.rollout.sampling(), trainer.group_size),
        greedy=greedy if "greedy_scores" in roles.algorithm.needs else None,
        actor=roles.actor,
        critic=roles.critic,
        weights=roles.weights,
        shape=roles.shape,
        compute=roles.compute,
        own_attention=roles.own_attention,
        controller=roles.controller,
        groups=roles.groups,
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


def _policy_module(given: Given, recipe: Recipe, device: torch.device) -> PreTrainedModel:
    if given.model is None:
        return recipe.load(device)
    moved: PreTrainedModel = cast(Any, given.model).to(
        device=device, dtype=compute_dtype(recipe.model.amp_dtype, device)
    )
    return moved
