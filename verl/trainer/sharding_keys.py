"""The keys of the 3D-HybridEngine, ``actor.model_config.hybrid_engine``, in the words of the other sections.

Sections as the user wrote them come in; the same without these keys go out, with ``actor.parallel`` and ``placement``
that say what they said. Starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from verl.common.errors import ConfigError
from verl.common.section import Section
from verl.engines.mesh import ParallelConfig
from verl.trainer.placement import PlacementConfig

WHERE = "actor.model_config"
_ENGINE = f"{WHERE}.hybrid_engine"


class RolloutSharding(Section):
    """The layout that samples."""

    tensor_parallel_size: int = Field(1, ge=1)
    """Ranks that split every matrix."""


class TrainingSharding(Section):
    """The layout that learns."""

    pipeline_parallel_size: int | None = Field(None, ge=1)
    """Stages: ``actor.parallel.pipeline_parallel_size``."""
    data_parallel_size: int | None = Field(None, ge=1)
    """Copies of the model: with the ranks of one they make ``placement.devices``."""


class HybridEngineKeys(Section):
    """One layout for sampling, another for learning."""

    enable: bool = False
    """Whether the two layouts below are asked for."""
    rollout_sharding: RolloutSharding = RolloutSharding()
    """Of the rollout."""
    training_sharding: TrainingSharding = TrainingSharding()
    """Of the actor."""


class ModelConfigKeys(Section):
    """What ``actor.model_config`` may hold."""

    hybrid_engine: HybridEngineKeys = HybridEngineKeys()
    """The layouts."""


def without_sharding_keys(sections: Mapping[str, Any]) -> dict[str, Any]:
    """``sections`` with ``actor.parallel`` and ``placement.devices`` in the place of ``actor.model_config``.

    Raises ConfigError for layouts that can't be, and for one that another key contradicts, naming both.
    """
    actor = sections.get("actor")
    if not isinstance(actor, Mapping) or "model_config" not in actor:
        return dict(sections)
    given = actor["model_config"]
    keys = ModelConfigKeys.parse(given if isinstance(given, Mapping) else {"hybrid_engine": given}, WHERE).hybrid_engine
    rest = {name: value for name, value in actor.items() if name != "model_config"}
    if not keys.enable:
        _refuse_layouts(keys)
        return {**sections, "actor": rest}
    if (size := keys.rollout_sharding.tensor_parallel_size) > 1:
        raise ConfigError(
            f"{_ENGINE}.rollout_sharding.tensor_parallel_size={size}: a rollout can't be split over ranks yet, each of "
            "its ranks holds the whole model and answers its share of the prompts. Set it to 1; the rollout still gets "
            "whole weights from whatever training_sharding says, and placement.rollout gives it devices of its own"
        )
    return _placed({**sections, "actor": rest}, keys.training_sharding)


def _refuse_layouts(keys: HybridEngineKeys) -> None:
    if asked := [name for name in ("rollout_sharding", "training_sharding") if keys.is_set(name)]:
        raise ConfigError(
            f"{_ENGINE}.{asked[0]} is given, but {_ENGINE}.enable isn't true: set it, or leave the layouts out"
        )


def _placed(sections: dict[str, Any], training: TrainingSharding) -> dict[str, Any]:
    actor = dict(sections["actor"])
    if training.pipeline_parallel_size is not None:
        actor["parallel"] = _with_stages(dict(actor.get("parallel") or {}), training.pipeline_parallel_size)
    if training.data_parallel_size is None:
        return {**sections, "actor": actor}
    ranks = ParallelConfig.parse(actor.get("parallel") or {}, "actor.parallel").ranks_per_model
    placement = _with_copies(dict(sections.get("placement") or {}), training.data_parallel_size, ranks)
    return {**sections, "actor": actor, "placement": placement}


def _with_stages(parallel: dict[str, Any], stages: int) -> dict[str, Any]:
    given = ParallelConfig.parse(parallel, "actor.parallel")
    if given.is_set("pipeline_parallel_size") and given.pipeline_parallel_size != stages:
        raise ConfigError(
            f"{_ENGINE}.training_sharding.pipeline_parallel_size={stages}, but "
            f"actor.parallel.pipeline_parallel_size={given.pipeline_parallel_size}: leave one of them out"
        )
    return {**parallel, "pipeline_parallel_size": stages}


def _with_copies(placement: dict[str, Any], copies: int, ranks: int) -> dict[str, Any]:
    """``placement`` with the devices, on each node, of ``copies`` models of ``ranks``."""
    given = PlacementConfig.parse(placement, "placement")
    takes = f"{_ENGINE}.training_sharding.data_parallel_size={copies} takes {copies * ranks} devices"
    devices, rest = divmod(copies * ranks, given.nodes)
    if rest:
        raise ConfigError(f"{takes}, which don't divide over placement.nodes={given.nodes}: change one of them")
    if given.devices is not None and given.num_devices != devices:
        raise ConfigError(f"{takes}, but placement.devices={given.devices}: leave one of them out")
    return {**placement, "devices": devices if given.devices is None else given.devices}
