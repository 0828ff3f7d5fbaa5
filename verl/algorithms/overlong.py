"""What a response's score loses for its length: a ramp before the limit instead of a cliff at it.

Knows lengths; not where a score stands or what is made of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from verl.algorithms.base import changed
from verl.common.section import Section


@dataclass(frozen=True)
class Ramp:
    """From 0 at ``buffer_tokens`` before ``max_tokens`` down to minus ``penalty`` there and beyond."""

    max_tokens: int
    buffer_tokens: int
    penalty: float


class OverlongConfig(Section):
    """A ramp over the last ``buffer_tokens`` before ``rollout.max_response_tokens``, down to minus ``penalty``."""

    formerly: ClassVar[dict[str, str]] = {"max_tokens": "it is rollout.max_response_tokens"}

    buffer_tokens: int | None = Field(default=None, gt=0)
    """Tokens before rollout.max_response_tokens over which the penalty grows from 0; the paper has a fifth of them.
    Null: no penalty."""
    penalty: float = Field(default=1.0, gt=0)
    """What the score loses at most, in reward units."""

    def ineffective_keys(self) -> list[str]:
        """Keys that were changed while there is no penalty."""
        is_idle = self.buffer_tokens is None and changed(self, "penalty")
        return ["overlong.penalty (overlong.buffer_tokens is null)"] if is_idle else []

    def ramp(self, max_tokens: int | None) -> Ramp | None:
        """The ramp before responses of ``max_tokens``, None where there is no penalty."""
        if self.buffer_tokens is None:
            return None
        assert max_tokens is not None, "a penalty for length needs the longest response allowed"
        return Ramp(max_tokens, self.buffer_tokens, self.penalty)


def overlong_loss(lengths: Tensor, ramp: Ramp) -> Tensor:
    """[B] float32, 0 or below: what is added to the scores of responses of ``lengths`` [B] sampled tokens.

    -penalty * clip((length - (max_tokens - buffer_tokens)) / buffer_tokens, 0, 1)
    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13. Length is that of what the policy sampled: tool output
    costs nothing.
    """
    exceed = lengths.float() - (ramp.max_tokens - ramp.buffer_tokens)
    return -ramp.penalty * (exceed / ramp.buffer_tokens).clamp(0, 1)
