"""The sections of an on-policy run and the checks that need two of them.

``PPOTrainer(**sections)`` and a YAML file with the same names go through ``OnPolicyRun.parse``: what one refuses the
other refuses too, before a model is loaded. (``config.py`` reads the files; the sections stand here because the Python
entry may not import it.)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from pydantic import Field, SerializeAsAny, field_validator, model_validator
from typing_extensions import Self

from verl.algorithms import ALGORITHMS
from verl.algorithms.base import AlgorithmConfig
from verl.common.errors import ConfigError
from verl.common.section import Section
from verl.data.config import DataConfig
from verl.engines.config import EngineConfig, TrainedConfig
from verl.models.loading import ModelConfig
from verl.observe.profiler import ProfileConfig
from verl.observe.trackers import TrackConfig
from verl.rewards.config import RewardConfig
from verl.rollout import ROLLOUT_ENGINES
from verl.rollout.config import RolloutConfig
from verl.trainer.placement import PlacementConfig, is_other_rank
from verl.trainer.sharding_keys import without_sharding_keys

log = logging.getLogger(__name__)

GIVEN = "(given in Python)"
"""Stands in the saved config where an object was passed instead of a name."""


class TrainerConfig(Section):
    """Length of the run, size of a step, what is written where."""

    output_dir: Path = Field(default_factory=lambda: Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S-%f}")
    """The run directory: config, metrics, rollouts, checkpoints, traces, logs. Default: `runs/` and the time."""
    seed: int = Field(0, ge=0)
    """Every random draw of the run follows from it."""
    device: str = "auto"
    """auto (a CUDA device if there is one), cpu, cuda or cuda:N. Of workers the kind: auto (CUDA if there is one for
    each), cpu or cuda; which ones says `placement`."""
    prompts_per_step: int = Field(32, ge=1)
    """Prompts drawn from the data set for each step."""
    group_size: int = Field(8, ge=1)
    """Responses sampled to each prompt."""
    total_steps: int | None = Field(None, ge=1)
    """Steps of the run; null: as many as `epochs` make."""
    epochs: int | None = Field(None, ge=1)
    """Passes over the training prompts, when `total_steps` is null; null for both: one epoch."""
    save_every: int | None = Field(None, ge=1)
    """Steps between checkpoints; null: only at the end. A run that is interrupted always saves."""
    keep_checkpoints: int | None = Field(2, ge=1)
    """Newest checkpoints to keep; null: all."""
    async_save: bool = True
    """Go on while a checkpoint is written, from copies in main memory, which take its size there. false: wait."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on from the newest whole checkpoint in `output_dir`; never: refuse to touch a run that is there."""
    save_rollouts_every: int | None = Field(1, ge=1)
    """Steps between files of samples with scores and log-probs; null: none."""

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
            raise ValueError("is no device: auto, cpu, cuda or cuda:N")
        return value

    @field_validator("output_dir")
    @classmethod
    def _home(cls, value: Path) -> Path:
        return value.expanduser()


class ValidationConfig(Section):
    """Scoring `data.val` on a schedule."""

    every: int | None = Field(None, ge=1)
    """Steps between validations; null: only `at_start` and at the end, when `data.val` is given."""
    at_start: bool = True
    """Validate before the first step."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    samples_per_prompt: int = Field(1, ge=1)
    """Responses to each prompt; over 1 also reports pass@k."""


class OnPolicyRun(Section):
    """A whole run of the on-policy family (PPO, GRPO and their kin)."""

    model: ModelConfig
    """The policy's starting point."""
    data: DataConfig
    """Prompts to train and validate on."""
    reward: RewardConfig
    """What scores a response."""
    algorithm: SerializeAsAny[AlgorithmConfig]
    """The algorithm, by `name`; its other keys are its own."""
    rollout: SerializeAsAny[RolloutConfig] = Field(default_factory=lambda: ROLLOUT_ENGINES.load("native").Config())
    """How responses are sampled, by engine `name`."""
    actor: TrainedConfig = TrainedConfig()
    """The policy in training."""
    critic: TrainedConfig = TrainedConfig()
    """The value function, for algorithms that use one."""
    reference: EngineConfig = EngineConfig()
    """The frozen starting policy, for algorithms that measure a KL to it."""
    validation: ValidationConfig = ValidationConfig()
    """Scoring held-out prompts."""
    placement: PlacementConfig = PlacementConfig()
    """Processes and devices of the roles."""
    trainer: TrainerConfig = TrainerConfig()
    """Length of the run and its outputs."""
    track: TrackConfig = TrackConfig()
    """Who is told of the metrics."""
    profile: ProfileConfig = ProfileConfig()
    """Traces of chosen steps."""

    @field_validator("algorithm", mode="before")
    @classmethod
    def _algorithm_by_name(cls, value: Any) -> Any:
        return _variant(value, ALGORITHMS, "algorithm")

    @field_validator("rollout", mode="before")
    @classmethod
    def _rollout_by_name(cls, value: Any) -> Any:
        return _variant(
            {"name": "native", **value} if isinstance(value, Mapping) else value, ROLLOUT_ENGINES, "rollout"
        )

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str = "") -> Self:
        """As in Section; ``actor.model_config.hybrid_engine`` is taken for what it means in other keys, and a variant's
        keys are named by their dotted path too."""
        try:
            return super().parse(without_sharding_keys(values), where)
        except ConfigError as error:
            text = str(error)
            for section in ("algorithm", "rollout"):
                text = text.replace(f"{section}: {section}", section)
            raise ConfigError(text) from None

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        if conflicts := _conflicts(self):
            raise ValueError("\n".join(conflicts))
        if not is_other_rank():  # rank 0 says it
            for message in self.ineffective_keys():
                log.warning(message)
        return self

    def as_yaml(self) -> str:
        """The effective config, defaults included, as YAML that reads back as the same config."""
        return OmegaConf.to_yaml(OmegaConf.create(self.model_dump(mode="json")))

    def ineffective_keys(self) -> list[str]:
        """One line for each key that the user set and that changes nothing in this run.

        A saved config sets every key; of such a one only those count that aren't at their defaults.
        """
        is_saved = self.model_fields_set == set(type(self).model_fields)
        lines = [f"algorithm.{key}" for key in self.algorithm.ineffective_keys()]
        for key, reason in _idle_keys(self).items():
            section: Section = self
            *parents, name = key.split(".")
            for parent in parents:
                section = getattr(section, parent)
            default = type(section).model_fields[name].get_default(call_default_factory=False)
            if section.is_set(name) and not (is_saved and getattr(section, name) == default):
                lines.append(f"{key}: {reason}")
        return [f"key without effect: {line}" for line in lines]


def _roles(run: OnPolicyRun) -> list[str]:
    """The roles that run a model."""
    needs = ALGORITHMS.load(run.algorithm.name)(run.algorithm).needs
    return ["actor", *(role for role in ("critic", "reference") if role in needs)]


def _idle_keys(run: OnPolicyRun) -> dict[str, str]:
    """Keys and sections that do nothing beside the other keys -> why."""
    found: dict[str, str] = {}
    for role in {"critic", "reference"} - set(_roles(run)):
        found[role] = f"algorithm {run.algorithm.name!r} as configured uses no {role}"
    if "reference" in _roles(run):
        found["reference.gradient_checkpointing"] = "the reference makes no backward pass"
    if run.data.val is None:
        found |= {key: "needs data.val" for key in ("validation", "data.exclude_val", "data.max_val_rows")}
    elif run.validation.temperature == 0:
        found["validation.samples_per_prompt"] = "validation.temperature is 0, so the samples of a prompt are equal"
    if run.data.chat == "never":
        found["data.chat_template_kwargs"] = "data.chat is never"
    if run.trainer.total_steps is not None:
        found["trainer.epochs"] = "trainer.total_steps is given and wins"
    if run.model.path is None:
        found["model.trust_remote_code"] = "needs model.path"
    if run.reward.workers == 0:
        found |= {key: "needs reward.workers above 0" for key in ("reward.timeout_s", "reward.cache")}
    for role in ("actor", "critic"):
        if getattr(run, role).optim.schedule == "constant":
            found[f"{role}.optim.min_lr_frac"] = f"needs {role}.optim.schedule linear or cosine"
    if "wandb" not in run.track.trackers:
        found |= {f"track.{key}": "needs wandb among track.trackers" for key in ("project", "run_name")}
    if not run.track.trackers:
        found["track.log_interval"] = "track.trackers is empty, and metrics.jsonl gets every step"
    if not run.profile.steps:
        found |= {f"profile.{key}": "needs profile.steps" for key in ("ranks", "with_stacks", "record_memory")}
    return found


def _conflicts(run: OnPolicyRun) -> list[str]:
    """What two sections make impossible together; each line names both keys."""
    found = []
    algorithm = ALGORITHMS.load(run.algorithm.name)
    if run.trainer.group_size < algorithm.min_group_size:
        found.append(
            f"trainer.group_size={run.trainer.group_size} is too small for algorithm.name={run.algorithm.name!r}, "
            f"which compares the responses of a prompt: at least {algorithm.min_group_size}"
        )
    longest = run.data.max_prompt_tokens + run.rollout.max_response_tokens
    for role in _roles(run):
        budget = getattr(run, role).max_tokens_per_micro_batch
        if longest > budget:
            found.append(
                f"a row of data.max_prompt_tokens + rollout.max_response_tokens = {longest} tokens doesn't fit "
                f"{role}.max_tokens_per_micro_batch={budget}: raise that key or lower one of the others"
            )
    rows = run.trainer.prompts_per_step * run.trainer.group_size
    for role in {"actor", "critic"} & set(_roles(run)):
        parts = getattr(run, role).mini_batches_per_epoch
        if parts > rows:
            found.append(
                f"{role}.mini_batches_per_epoch={parts} is more than the {rows} responses of a step "
                f"(trainer.prompts_per_step × trainer.group_size)"
            )
    return found + _placement_conflicts(run)


def _placement_conflicts(run: OnPolicyRun) -> list[str]:
    """Parallel sizes, and keys for several ranks, that a role's devices have no room for."""
    found = []
    placement, device = run.placement, run.trainer.device
    for role in _roles(run):
        section: EngineConfig = getattr(run, role)
        ranks, each = len(placement.devices_of(role)) * placement.nodes, section.parallel.ranks_per_model
        where = f"{placement.key_of(role)} ({ranks} device{'s' * (ranks > 1)})"
        if ranks % each:
            sizes = [f"{role}.parallel.{key}={size}" for key, size in section.parallel.model_dump().items() if size > 1]
            found.append(
                f"{' × '.join(sizes)} takes {each} ranks a model, which doesn't divide those of {where}: make them a "
                f"multiple of {each}, or lower the sizes"
            )
        if section.offload_parameters and ranks == 1:
            found.append(
                f"{role}.offload_parameters=true needs several ranks, whose slices can lie in CPU memory, and there is "
                f"one: set it to false, or raise {where}"
            )
    if placement.kind != "inprocess" and device.startswith("cuda:"):
        found.append(
            f"trainer.device={device} names one device, and placement.executor={placement.kind} has workers: name "
            "theirs in placement.devices, and set trainer.device to cuda, cpu or auto"
        )
    return found


def _variant(value: Any, registry: Any, section: str) -> Any:
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        return value
    if "name" not in value:
        raise ValueError(f"{section}.name is missing. Known: {', '.join(sorted(registry))}")
    return registry.load(str(value["name"])).Config.parse(value, section)
