"""The sections that every run has, and the checks that need two of them.

A trainer's keywords and a YAML file with the same names go through ``Run.parse``: what one refuses the other refuses
too, before a model is loaded. Each family of algorithms adds sections of its own in a file of its own.
(``config.py`` reads the files; the sections stand here because the Python entry may not import it.)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Literal

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
from verl.trainer.placement import OWN, PlacementConfig, is_other_rank
from verl.trainer.sharding_keys import without_sharding_keys

log = logging.getLogger(__name__)

GIVEN = "(given in Python)"
"""Stands in the saved config where an object was passed instead of a name."""


class BaseTrainerConfig(Section):
    """Length of the run, what is written where."""

    output_dir: Path = Field(default_factory=lambda: Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S-%f}")
    """The run directory: config, metrics, samples, checkpoints, traces, logs. Default: `runs/` and the time."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Every random draw of the run follows from it."""
    device: str = "auto"
    """auto (a CUDA device if there is one), cpu, cuda or cuda:N. Of workers the kind: auto (CUDA if there is one for
    each), cpu or cuda; which ones says `placement`."""
    total_steps: int | None = Field(None, ge=1)
    """Steps of the run; null: as many as `epochs` make."""
    epochs: int | None = Field(None, ge=1)
    """Passes over the training data, when `total_steps` is null; null for both: one epoch."""
    save_every: int | None = Field(None, ge=1)
    """Steps between checkpoints; null: only at the end. A run that is interrupted always saves."""
    keep_checkpoints: int | None = Field(2, ge=1)
    """Newest checkpoints to keep; null: all."""
    async_save: bool = True
    """Go on while a checkpoint is written, from copies in main memory, which take its size there. false: wait."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on from the newest whole checkpoint in `output_dir`; never: refuse to touch a run that is there."""

    max_skipped_in_a_row: int = Field(10, ge=1)
    """Updates left out in a row, since their loss or gradient wasn't finite, at which the run stops."""

    @property
    def rows_per_batch(self) -> int:
        """Rows of the training data that a step draws at a time."""
        raise NotImplementedError

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


class BaseValidationConfig(Section):
    """Measuring on `data.val` on a schedule."""

    every: int | None = Field(None, ge=1)
    """Steps between validations; null: only `at_start` and at the end, when `data.val` is given."""
    at_start: bool = True
    """Validate before the first step."""


class Run(Section):
    """A whole run of one family of algorithms."""

    family: ClassVar[str]
    """Of the algorithms that it trains with."""
    must_say: ClassVar[dict[str, str]] = {
        "model": "model.path (or model.scratch), the model to start from",
        "data.train": "data.train, what to train on",
        "algorithm": "algorithm.name, such as grpo or ppo",
    }
    """Keys without a default, alternatives between bars -> what to say when they aren't there."""
    variants: ClassVar[dict[str, Any]] = {"algorithm": ALGORITHMS}
    """Sections whose keys depend on their ``name`` -> the table of names."""

    model: ModelConfig
    """The policy's starting point."""
    data: DataConfig
    """What to train and validate on."""
    algorithm: SerializeAsAny[AlgorithmConfig]
    """The algorithm, by `name`; its other keys are its own."""
    actor: TrainedConfig = TrainedConfig()
    """The policy in training."""
    reference: EngineConfig = EngineConfig()
    """The frozen starting policy, for algorithms that measure a KL to it."""
    validation: BaseValidationConfig = BaseValidationConfig()
    """Measuring on held-out rows."""
    placement: PlacementConfig = PlacementConfig()
    """Processes and devices of the roles."""
    trainer: BaseTrainerConfig = Field(default_factory=BaseTrainerConfig)
    """Length of the run and its outputs."""
    track: TrackConfig = TrackConfig()
    """Who is told of the metrics."""
    profile: ProfileConfig = ProfileConfig()
    """Traces of chosen steps."""

    @field_validator("algorithm", mode="before")
    @classmethod
    def _algorithm_by_name(cls, value: Any) -> Any:
        section = variant(value, ALGORITHMS, "algorithm")
        if isinstance(section, AlgorithmConfig) and (found := ALGORITHMS.load(section.name).family) != cls.family:
            raise ValueError(
                f"algorithm.name={section.name!r} is of the family {found!r}, and this trainer is for {cls.family!r}: "
                "use the trainer of that family, or verl train, which picks it"
            )
        return section

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str = "") -> Self:
        """As in Section; ``actor.model_config.hybrid_engine`` is taken for what it means in other keys, and a variant's
        keys are named by their dotted path too."""
        try:
            return super().parse(without_sharding_keys(values), where)
        except ConfigError as error:
            text = str(error)
            for section in cls.variants:
                text = text.replace(f"{section}: {section}", section)
            raise ConfigError(text) from None

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        if conflicts := self.conflicts():
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
        for key, reason in self.idle_keys().items():
            section: Section = self
            *parents, name = key.split(".")
            for parent in parents:
                section = getattr(section, parent)
            default = type(section).model_fields[name].get_default(call_default_factory=False)
            if section.is_set(name) and not (is_saved and getattr(section, name) == default):
                lines.append(f"{key}: {reason}")
        return [f"key without effect: {line}" for line in lines]

    def roles(self) -> list[str]:
        """The roles that run a model."""
        return ["actor"]

    def placed_roles(self) -> list[str]:
        """The roles that ``placement`` has a say on."""
        return self.roles()

    def idle_keys(self) -> dict[str, str]:
        """Keys and sections that do nothing beside the other keys -> why."""
        found: dict[str, str] = {}
        if self.data.val is None:
            found |= {key: "needs data.val" for key in ("validation", "data.exclude_val", "data.max_val_rows")}
        if self.data.chat == "never":
            found["data.chat_template_kwargs"] = "data.chat is never"
        if self.trainer.total_steps is not None:
            found["trainer.epochs"] = "trainer.total_steps is given and wins"
        if self.model.lora.is_on:
            reason = "with model.lora the reference is the model below the adapter, which the actor's engine runs"
            found |= dict.fromkeys(("reference", "placement.reference"), reason)
        else:
            found |= dict.fromkeys(("model.lora.alpha", "model.lora.target_modules"), "needs model.lora.rank")
        for role in set(OWN) - set(self.placed_roles()):
            found.setdefault(f"placement.{role}", f"the run as configured has no {role}")
        if self.model.path is None:
            found["model.trust_remote_code"] = "needs model.path"
        if not self.track.trackers:
            found["track.log_interval"] = "track.trackers is empty, and metrics.jsonl gets every step"
        if not self.profile.steps:
            found |= {f"profile.{key}": "needs profile.steps" for key in ("ranks", "record")}
        return found

    def conflicts(self) -> list[str]:
        """What two sections make impossible together; each line names both keys."""
        return _placement_conflicts(self)


def _placement_conflicts(run: Run) -> list[str]:
    """Parallel sizes, and keys for several ranks, that a role's devices have no room for."""
    found = []
    placement, device = run.placement, run.trainer.device
    for role in run.roles():
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


def variant(value: Any, registry: Any, section: str) -> Any:
    """The section that ``value`` (a name, or keys with one) stands for. Raises ValueError without a name."""
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        return value
    if "name" not in value:
        raise ValueError(f"{section}.name is missing. Known: {', '.join(sorted(registry))}")
    return registry.load(str(value["name"])).Config.parse(value, section)
