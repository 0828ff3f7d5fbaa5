"""From the sections of a run to its roles: the models, here or on workers.

The only place that knows which engine, network and worker make up a role. Nothing here trains or reads data.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.common.errors import ConfigError
from verl.common.files import folder_written_aside
from verl.common.seeding import seed_everything
from verl.controller import Controller, ResourcePool, WorkerGroup
from verl.engines.mesh import Mesh
from verl.engines.parallel import check_cuts
from verl.hybrid_engine.colocated import SharedWeights
from verl.models.attention import ATTENTION
from verl.models.causal_lm import CausalLM
from verl.models.loading import compute_dtype, outline_of
from verl.models.lora import check_installed
from verl.models.networks import PolicyNetwork
from verl.models.precision import cast_parameters
from verl.observe.flops import ModelShape
from verl.trainer.base_sections import GIVEN, Run
from verl.trainer.inputs import pick_device
from verl.trainer.measures import Compute
from verl.trainer.parts import Roles, Sampler
from verl.trainer.placement import launched_ranks, layout_of
from verl.trainer.reward_folder import NamedRewardModel
from verl.workers.recipe import Recipe, learner
from verl.workers.reference import BaseReference, Reference
from verl.workers.remote import RemoteEngine, RemoteRollout, RemoteWeights
from verl.workers.served import EngineWorker, RolloutWorker
from verl.workers.tracer import Tracer
from verl.workers.trained import Critic

log = logging.getLogger(__name__)


@contextmanager
def controller_for(config: Run, model: PreTrainedModel | None) -> Iterator[Controller | None]:
    """The controller of a run on workers, None of one in this process; closed where the block raises.

    It is made first of all: other ranks of torchrun wait for it, while data may take minutes. Raises ConfigError for a
    device that isn't there and for a ``model`` given as an object where workers would need it, MissingExtra for an
    adapter without the package that makes it.
    """
    _check_placement(config, model)
    placement = config.placement
    if placement.kind == "inprocess":
        yield None
        return
    if idle := placement.idle_ranks:
        log.warning(
            "torchrun started %d processes, and ranks %s have no role: start fewer, or raise placement.devices",
            launched_ranks(),
            idle,
        )
    with ExitStack() as on_error:
        yield on_error.enter_context(Controller(placement.kind, call_timeout_s=placement.call_timeout_s))
        on_error.pop_all()


def _check_placement(config: Run, model: PreTrainedModel | None) -> None:
    if config.model.lora.is_on:
        check_installed()
    if config.placement.kind != "inprocess" and model is not None:
        raise ConfigError(
            f"a model given as an object can't go to the workers of placement.executor={config.placement.kind}: save "
            "it with save_pretrained and give the folder, or set placement.executor=inprocess"
        )
    pick_device(config.trainer.device)


def recipe_of(config: Run, tokenizer: PreTrainedTokenizerBase) -> Recipe:
    """What every run says of its models; one that samples adds to it."""
    return Recipe(
        model=config.model,
        tokenizer=tokenizer,
        algorithm=config.algorithm,
        actor=config.actor,
        reference=config.reference,
        seed=config.trainer.seed,
    )


def build_roles(
    config: Run,
    model: PreTrainedModel | None,
    recipe: Recipe,
    controller: Controller | None,
    reward_model: NamedRewardModel | None = None,
) -> Roles:
    """The roles that ``recipe`` describes: on workers of ``controller``, or without one in this process, on ``model``
    where one was given. ``reward_model`` goes to the workers too."""
    seed_everything(config.trainer.seed)
    kept = config.trainer.output_dir / "base"
    recipe = replace(recipe, base=_found_again(config.model.path) or str(kept))
    if controller is None:
        roles = _roles_here(config, model, recipe)
    else:
        roles = _roles_on_workers(config, recipe, controller, reward_model)
    if config.model.lora.is_on and recipe.base == str(kept) and not kept.exists():
        with folder_written_aside(kept) as aside:
            roles.actor.engine.save_base(aside)
    return roles


def _found_again(path: str | None) -> str | None:
    """``path`` as another process can find the model; None for a model that exists in this run alone."""
    if path is None or path == GIVEN:
        return None
    folder = Path(path).expanduser()
    return str(folder.absolute()) if folder.is_dir() else path


def _roles_here(config: Run, model: PreTrainedModel | None, recipe: Recipe) -> Roles:
    """All roles in this process, the rollout on the very weights that the actor trains."""
    device = pick_device(config.trainer.device)
    module = _policy_module(model, recipe, device)
    algorithm = recipe.make_algorithm(module.dtype)
    own_attention = "sdpa" if module.config._attn_implementation == ATTENTION else module.config._attn_implementation
    single = Mesh.build(recipe.actor.parallel, device.type)
    needs_reference, has_base = "reference" in algorithm.needs, config.model.lora.is_on
    frozen = copy.deepcopy(module) if needs_reference and not has_base else None
    critic = (
        recipe.make_critic(copy.deepcopy(module), algorithm, device, Mesh.build(recipe.critic.parallel, device.type))
        if "critic" in algorithm.needs
        else None
    )
    lm = CausalLM(module)
    actor = recipe.make_actor(lm, algorithm, device, single)
    sampler = None
    if recipe.rollout is not None:
        engine = recipe.make_rollout(lm)
        sampler = Sampler(engine, SharedWeights(actor.engine, engine, lm.module))
    reference: Reference | None = BaseReference(actor.engine) if needs_reference and has_base else None
    if frozen is not None:
        reference = recipe.make_reference(frozen, device, Mesh.build(recipe.reference.parallel, device.type))
    return Roles(
        device=device,
        module=module,
        actor=actor,
        critic=critic,
        reference=reference,
        sampler=sampler,
        shape=ModelShape.of(module),
        compute=Compute(device, 1),
        own_attention=own_attention,
    )


def _roles_on_workers(
    config: Run, recipe: Recipe, controller: Controller, reward_model: NamedRewardModel | None
) -> Roles:
    """A worker group for each role, on the devices that ``placement`` names, and what stands for it here."""
    placement, seed = config.placement, config.trainer.seed
    outline = PolicyNetwork(CausalLM(outline_of(config.model, recipe.tokenizer)))
    parallel = {role: getattr(recipe, role).parallel for role in config.roles()}
    for role, sizes in parallel.items():
        check_cuts(outline, sizes, role, with_adapter=config.model.lora.is_on)
    kind: Any = {"auto": None, "cpu": "cpu"}.get(config.trainer.device, "cuda")
    pools: dict[tuple[int, ...], ResourcePool] = {}

    def pool(role: str) -> ResourcePool:
        devices = placement.devices_of(role)
        return pools.setdefault(devices, ResourcePool(devices, nodes=placement.nodes, kind=kind))

    def group(role: str) -> WorkerGroup:
        return controller.group(role, EngineWorker, pool(role), layout_of(parallel[role]), role=role, recipe=recipe)

    actor_group = group("actor")
    device_name = actor_group.device_name().get()
    device_type = "cpu" if device_name == "cpu" else "cuda"
    algorithm = recipe.make_algorithm(compute_dtype(config.model.amp_dtype, torch.device(device_type)))
    actor_engine = RemoteEngine(actor_group, algorithm, learner(algorithm).writes)
    actor = learner(algorithm)(cast(Any, actor_engine), recipe.actor, algorithm, seed)
    groups, critic, reference, sampler = [actor_group], None, None, None
    if "critic" in algorithm.needs:
        groups.append(group("critic"))
        critic = Critic(cast(Any, RemoteEngine(groups[-1], algorithm, Critic.writes)), recipe.critic, algorithm, seed)
    if "reference" in algorithm.needs and config.model.lora.is_on:  # the actor's workers, with the adapter off
        base = RemoteEngine(actor_group, algorithm, Reference.writes, infer=actor_group.infer_base)
        reference = Reference(cast(Any, base))
    elif "reference" in algorithm.needs:
        groups.append(group("reference"))
        reference = Reference(cast(Any, RemoteEngine(groups[-1], algorithm, Reference.writes)))
    if recipe.rollout is not None:
        groups.append(controller.group("rollout", RolloutWorker, pool("rollout"), recipe=recipe))
        rollout = RemoteRollout(groups[-1])
        weights = RemoteWeights(actor_engine, rollout, is_colocated=pool("rollout") is pool("actor"))
        weights.set_version(0)
        sampler = Sampler(rollout, weights)
    if reward_model is not None:
        reward_model.start_on(controller, pool("reward"))
    return Roles(
        device=torch.device("cpu"),
        module=None,
        actor=actor,
        critic=critic,
        reference=reference,
        sampler=sampler,
        shape=ModelShape.of(outline.module),
        compute=Compute(device_name, actor_group.grid.world_size),
        controller=controller,
        groups=groups,
        tracers=_tracers(config, controller, list(pools.values())),
    )


def _tracers(config: Run, controller: Controller, pools: list[ResourcePool]) -> list[WorkerGroup]:
    """The profilers of all workers, where steps are traced."""
    if not config.profile.steps:
        return []
    keys: dict[str, Any] = {"config": config.profile, "folder": config.trainer.output_dir / "traces"}
    first_ranks = itertools.accumulate((pool.size for pool in pools), initial=0)
    return [
        controller.group(f"tracer of rank {first}", Tracer, pool, first_rank=first, **keys)
        for first, pool in zip(first_ranks, pools, strict=False)
    ]


def _policy_module(model: PreTrainedModel | None, recipe: Recipe, device: torch.device) -> PreTrainedModel:
    if model is None:
        return recipe.load(device)
    dtype = compute_dtype(recipe.model.amp_dtype, device)
    moved: PreTrainedModel = cast(Any, model).to(device)
    if moved.dtype != dtype:
        cast_parameters(moved, dtype)
    return recipe.adapted(moved)
