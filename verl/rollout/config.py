"""The keys that every rollout engine shares; an engine's own keys live in a subclass beside the engine."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from verl.common.section import Section
from verl.rollout.base import SamplingParams


class RolloutConfig(Section):
    """How responses are sampled in training.

    There is no top-k, no top-p and no minimum length that bans the stop ids: the sampler must be the policy.
    """

    name: str = "native"
    """The rollout engine."""
    temperature: float = 1.0
    """Divides the logits, in sampling and in every log-prob that training computes; > 0."""
    max_response_tokens: int = Field(default=512, ge=1)
    """Tokens sampled at most for one response, its stop token counted."""
    stop: list[str] = []
    """Strings that end a response; the token that completes one is kept."""
    stop_token_ids: list[int] = []
    """Token ids that end a response besides the tokenizer's end-of-sequence ids; the id is kept."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence id, to max_response_tokens."""

    @field_validator("temperature")
    @classmethod
    def _temperature_is_positive(cls, value: float) -> float:
        if value <= 0:
            raise ValueError(
                f"temperature must be > 0 in training, got {value}: greedy decoding has no log-prob to learn from "
                "(evaluation may be greedy)"
            )
        return value

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Self:
        self.sampling()
        return self

    def sampling(self, **changes: Any) -> SamplingParams:
        """The settings as an engine takes them, with ``changes`` by SamplingParams' names (an evaluation's, say)."""
        settings: dict[str, Any] = {
            "max_new_tokens": self.max_response_tokens,
            "temperature": self.temperature,
            "stop": tuple(self.stop),
            "stop_token_ids": tuple(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
        }
        return SamplingParams(**(settings | changes))
