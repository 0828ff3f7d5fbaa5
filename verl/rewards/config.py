"""The keys of a run's reward: which function, its time limit, and what happens to rows that it fails on."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from verl.common.errors import ConfigError, UnknownName
from verl.common.section import Section
from verl.rewards import REWARDS
from verl.rewards.calling import find

SOURCES = ("name", "function", "model")
"""Keys that say what scores; a run has one of them."""


class RewardConfig(Section):
    """One of ``name``, ``function`` and ``model``, unless a callable or a reward model is passed in Python."""

    name: str | None = None
    """A reward that ships: characters, exact, gsm8k, math, number, reasoning_gym."""
    function: str | None = None
    """Your own: ``path/to/file.py:function`` or ``package.module:function``."""
    model: str | None = Field(default=None, min_length=1)
    """A reward model: folder or hub name of a sequence classifier of one label, such as a run with the algorithm
    bradley_terry makes. It scores where ``placement`` says."""
    kwargs: dict[str, Any] = {}
    """Further arguments of the function."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that one response may take; then the work is ended and the row counts as failed."""
    workers: int = Field(default=2, ge=0)
    """Processes that score; 0 scores in the training process, without time limits (for a debugger)."""
    on_failure: Literal["drop", "zero", "raise"] = "drop"
    """A row whose reward failed: is kept out of training, scores 0, or ends the run. It is counted in any case."""
    cache: bool = False
    """Score equal responses to equal rows once. Only for rewards that always give the same score."""

    @field_validator("name")
    @classmethod
    def _name_is_known(cls, name: str | None) -> str | None:
        if name is not None and name not in REWARDS:
            raise UnknownName("reward", name, REWARDS)
        return name

    @field_validator("function")
    @classmethod
    def _function_is_found(cls, function: str | None) -> str | None:
        if function is not None:
            find(function)
        return function

    @model_validator(mode="after")
    def _one_reward(self) -> RewardConfig:
        chosen = [f"{key!r} ({value!r})" for key in SOURCES if (value := getattr(self, key)) is not None]
        if len(chosen) > 1:
            raise ConfigError(f"keys {' and '.join(chosen)} each choose a reward: keep one")
        return self
