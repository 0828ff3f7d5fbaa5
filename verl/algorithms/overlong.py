"""What a response's score loses for its length: a ramp before the limit instead of a cliff at it.

Knows lengths; not where a score stands or what is made of it.
"""

from __future__ import annotations

import torch
from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import Self

from verl.algorithms.base import changed
from verl.common.section import Section


class OverlongConfig(Section):
    """A ramp over the last ``buffer_tokens`` before ``max_tokens``, down to minus ``penalty``."""

    max_tokens: int | None = Field(default=None, gt=0)
    """Length from which a response loses the whole penalty, as a rule rollout.max_response_tokens; null: no penalty."""
    buffer_tokens: int | None = Field(default=None, gt=0)
    """Tokens before max_tokens over which the penalty grows from 0; the paper has a fifth of max_tokens."""
    penalty: float = Field(default=1.0, gt=0)
    """What the score loses at most, in reward units."""

    @model_validator(mode="after")
    def _ramp_is_given(self) -> Self:
        if self.max_tokens is not None and not (self.buffer_tokens and self.buffer_tokens <= self.max_tokens):
            raise ValueError(
                f"overlong.max_tokens={self.max_tokens} needs overlong.buffer_tokens, 1 to that many, got "
                f"{self.buffer_tokens}: set it, or max_tokens to null"
            )
        return self

    def ineffective_keys(self) -> list[str]:
        """Keys that were changed while there is no penalty."""
        if self.max_tokens is not None:
            return []
        keys = ("buffer_tokens", "penalty")
        return [f"overlong.{key} (overlong.max_tokens is null)" for key in keys if changed(self, key)]


def overlong_loss(lengths: Tensor, config: OverlongConfig) -> Tensor:
    """[B] float32, 0 or below: what is added to the scores of responses of ``lengths`` [B] sampled tokens.

    -penalty * clip((length - (max_tokens - buffer_tokens)) / buffer_tokens, 0, 1)
    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13. Length is that of what the policy sampled: tool output
    costs nothing.
    """
    if config.max_tokens is None:
        return torch.zeros_like(lengths, dtype=torch.float32)
    assert config.buffer_tokens is not None
    exceed = lengths.float() - (config.max_tokens - config.buffer_tokens)
    return -config.penalty * (exceed / config.buffer_tokens).clamp(0, 1)
