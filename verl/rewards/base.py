"""What a reward is given and what counts as a score.

A reward's return value comes in, a ``RewardResult`` goes out: a finite number, or a failure that says why not.
A failure is never turned into a score here. Knows nothing of processes, time limits or policies for failures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

Failure = Literal["timeout", "error", "invalid"]
FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class Reward:
    """A score and the parts that it is made of; parts are reported as metrics, never trained on."""

    score: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RewardItem:
    """One response to score.

    prompt        what the data row holds: text or chat messages
    row           the other columns of the data row, by name
    prompt_ids    token ids of the prompt, where known; a reward model without a tokenizer reads them
    response_ids  token ids of the response, where known
    """

    prompt: Any
    response: str
    ground_truth: Any = None
    row: Mapping[str, Any] = field(default_factory=dict)
    prompt_ids: Sequence[int] | None = None
    response_ids: Sequence[int] | None = None

    def fields(self) -> dict[str, Any]:
        """Everything that a reward can name as an argument; the item's own fields win over columns of the row."""
        own = {"prompt": self.prompt, "response": self.response, "ground_truth": self.ground_truth}
        ids = {"prompt_ids": self.prompt_ids, "response_ids": self.response_ids}
        return {**self.row, **own, **{name: value for name, value in ids.items() if value is not None}}


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """The score of one response, or why there is none.

    score    finite in float32; None where the reward failed (0.0 where failures are configured to count as zero)
    parts    what the score is made of
    failure  "timeout": over the time limit; "error": raised or died; "invalid": returned something that is no score
    detail   one line for the log
    """

    score: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    detail: str = ""


@runtime_checkable
class ScoresItems(Protocol):
    """A reward that wants all items at once, in this process: a reward model."""

    def score_items(self, items: Sequence[RewardItem]) -> Sequence[Any]:
        """One value an item, in order: whatever a reward function may return, or a RewardResult."""
        ...


@runtime_checkable
class LoadsFirst(Protocol):
    """A reward that has something large to load before it scores."""

    def load(self) -> None:
        """Load it, unless that is done."""
        ...


def failed(failure: Failure, detail: str) -> RewardResult:
    """A result without a score."""
    return RewardResult(score=None, failure=failure, detail=detail)


def as_result(value: Any) -> RewardResult:
    """What a reward returned, as a result: number, one-element array or tensor, Reward, or dict with "score".

    The other numbers of a dict are its parts. None, text, sequences, NaN and what float32 can't hold are "invalid".
    """
    if isinstance(value, RewardResult):
        return value
    parts: Mapping[Any, Any] = {}
    if isinstance(value, Reward):
        value, parts = value.score, value.parts
    elif isinstance(value, Mapping):
        if "score" not in value:
            return failed("invalid", f'a dict needs the key "score", got the keys {sorted(map(str, value))}')
        value, parts = value["score"], {name: part for name, part in value.items() if name != "score"}
    score = as_number(value)
    if score is None:
        return failed("invalid", f"returned {_short(value)}, which is no number")
    if not abs(score) <= FLOAT32_MAX:
        return failed("invalid", f"returned {score!r}, which is no finite float32")
    numbers = {str(name): number for name, part in parts.items() if (number := as_number(part)) is not None}
    odd = [name for name, number in numbers.items() if not math.isfinite(number)]
    detail = f"parts left out because they aren't finite: {', '.join(odd)}" if odd else ""
    return RewardResult(score=score, parts={name: x for name, x in numbers.items() if name not in odd}, detail=detail)


def as_number(value: Any) -> float | None:
    """``value`` as a float where it is one number (0-d and one-element arrays and tensors too), else None."""
    if isinstance(value, (str, bytes, Mapping)) or value is None:
        return None
    if not isinstance(value, (bool, int, float)) and hasattr(value, "item") and hasattr(value, "shape"):
        if math.prod(value.shape) != 1:
            return None
        value = value.item()
    if not hasattr(type(value), "__float__") or isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
    except OverflowError:
        return math.inf


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # a user's __repr__
        text = f"<unprintable: {error!r}>"
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
