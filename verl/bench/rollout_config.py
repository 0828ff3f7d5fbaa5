"""The keys of ``verl bench rollout``: a model, a rollout engine, and the size of each workload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf
from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from verl.bench.setting import SMALL_MODEL
from verl.common.errors import ConfigError
from verl.common.section import Section
from verl.config import parse_overrides
from verl.models.loading import ModelConfig
from verl.rollout import ROLLOUT_ENGINES
from verl.rollout.config import RolloutConfig

SHORTEST = 32
"""Tokens of the shortest response of the workload with spread lengths."""
_FIXED_HERE = ("max_response_tokens", "stop", "stop_token_ids", "ignore_eos")
"""Keys of the rollout section that would change how long responses are."""


class Fixed(Section):
    """Responses of one length, each to a prompt of its own."""

    rows: int = Field(64, ge=1)
    """Requests of a call."""
    prompt_tokens: int = Field(32, ge=1)
    """Tokens of each prompt."""
    new_tokens: int = Field(64, ge=1)
    """Tokens of each response."""


class Spread(Section):
    """Responses of lengths uniform in [32, 4 x new_tokens], which the seed decides."""

    rows: int = Field(32, ge=1)
    """Requests of a call."""
    prompt_tokens: int = Field(32, ge=1)
    """Tokens of each prompt."""
    new_tokens: int = Field(32, ge=1)
    """A quarter of the longest response's tokens."""

    @field_validator("new_tokens")
    @classmethod
    def _longest_is_not_below_shortest(cls, value: int) -> int:
        if 4 * value < SHORTEST:
            raise ValueError(f"must be at least {SHORTEST // 4}: lengths are uniform in [{SHORTEST}, 4 x new_tokens]")
        return value


class Group(Section):
    """Several responses to each long prompt."""

    rows: int = Field(4, ge=1)
    """Prompts of a call."""
    group_size: int = Field(8, ge=2)
    """Responses to each prompt."""
    prompt_tokens: int = Field(256, ge=1)
    """Tokens of each prompt."""
    new_tokens: int = Field(32, ge=1)
    """Tokens of each response."""


class Update(Section):
    """What follows a change of the weights in place."""

    rows: int = Field(1, ge=1)
    """Requests of the call behind the change."""
    prompt_tokens: int = Field(32, ge=1)
    """Tokens of each prompt."""
    new_tokens: int = Field(1, ge=1)
    """Tokens of each response."""


class Sleep(Section):
    """Giving the cache back and taking it again, between calls of this size."""

    rows: int = Field(64, ge=1)
    """Requests of a call."""
    prompt_tokens: int = Field(32, ge=1)
    """Tokens of each prompt."""
    new_tokens: int = Field(16, ge=1)
    """Tokens of each response."""


class Machine(Section):
    """Where it runs, and what every draw follows from; named as in a run."""

    device: str = "auto"
    """auto (a CUDA device if there is one), cpu, cuda or cuda:N."""
    seed: int = Field(0, ge=0)
    """Weights, prompts, lengths and samples follow from it."""


class RolloutBench(Section):
    """Everything that ``verl bench rollout`` runs on."""

    model: ModelConfig
    """The model; from scratch its weights are random."""
    rollout: dict[str, Any] = {}
    """The rollout engine by `name`, and its keys."""
    trainer: Machine = Machine()
    """Device and seed."""
    fixed: Fixed = Fixed()
    """Responses of one length."""
    spread: Spread = Spread()
    """Responses of many lengths."""
    group: Group = Group()
    """Several responses to a prompt."""
    update: Update = Update()
    """The first call after new weights."""
    sleep: Sleep = Sleep()
    """The cache given back and taken again."""

    @model_validator(mode="after")
    def _engine_is_known(self) -> Self:
        self.engine_config()
        return self

    @classmethod
    def read(cls, overrides: Sequence[str]) -> Self:
        """The small model and ``key.path=value`` words over it. Raises ConfigError for a wrong key or value."""
        sections: Any = OmegaConf.to_container(OmegaConf.merge({"model": SMALL_MODEL}, parse_overrides(overrides)))
        return cls.parse(sections)

    def engine_config(self) -> RolloutConfig:
        """The rollout section with the chosen engine's own keys. Raises ConfigError for one that means nothing here."""
        keys = {"name": "native", **self.rollout}
        if idle := [f"rollout.{key}" for key in _FIXED_HERE if key in keys]:
            raise ConfigError(
                f"{', '.join(idle)} can't be set here: every response is as long as its workload says. Set "
                "new_tokens of the workload, such as fixed.new_tokens=256"
            )
        found: RolloutConfig = ROLLOUT_ENGINES.load(str(keys["name"])).Config.parse(keys, "rollout")
        return found
