"""What every rollout engine offers: prompts in, responses with log-probs and finish reasons out.

An engine knows token ids, sampling settings and weights. It knows nothing of rewards, groups or training.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from verl.batch import FinishReason
from verl.common.errors import ConfigError

_COLDEST = 1e-6  # logits over less leave float32, and near 1e-46 it would silently be 0, which is greedy


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Every default is neutral; nothing is taken from a model's generation_config.json.

    max_new_tokens  tokens sampled at most, the stop token counted
    temperature     0 is greedy (log-probs are then of the untempered distribution), else at least 1e-6
    top_k           keep the k likeliest tokens; 0 keeps all
    top_p           keep the smallest set of tokens with this probability mass; 1 keeps all
    min_p           keep tokens at least this fraction as likely as the likeliest; 0 keeps all
    min_new_tokens  stop tokens can't be sampled before this many tokens
    stop            strings that end a response; it keeps the tokens up to the one that completes the string
    stop_token_ids  ids that end a response, besides the engine's end-of-sequence ids; the id is kept
    ignore_eos      don't end at the engine's end-of-sequence ids
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(
                    f"{name} must be a list, got {getattr(self, name)!r}: write [{getattr(self, name)!r}]"
                )
            object.__setattr__(self, name, tuple(getattr(self, name)))
        checks = [
            (self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, ">= 1"),
            (
                self.temperature == 0 or _COLDEST <= self.temperature < math.inf,
                "temperature",
                self.temperature,
                f"0 (greedy), or >= {_COLDEST} and finite",
            ),
            (self.top_k >= 0, "top_k", self.top_k, ">= 0 (0 keeps all)"),
            (0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]"),
            (0 <= self.min_p < 1, "min_p", self.min_p, "in [0, 1)"),
            (
                0 <= self.min_new_tokens <= self.max_new_tokens,
                "min_new_tokens",
                self.min_new_tokens,
                f"between 0 and max_new_tokens = {self.max_new_tokens}",
            ),
            (all(self.stop), "stop", self.stop, "a list of strings that aren't empty"),
        ]
        for is_good, name, value, allowed in checks:
            if not is_good:
                raise ConfigError(f"{name} must be {allowed}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Response:
    """What came of a request. ``log_probs`` are of the tempered distribution, before top-k, top-p and min-p.

    finish_reason    ABORT where generation was paused before the response ended: a Request may resume it
    policy_version   the oldest weights that sampled a token of it (those at hand, where it has none)
    policy_versions  the weights that sampled each token: more than one when it was resumed after an update
    """

    response_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    policy_version: int
    policy_versions: list[int]

    def __reduce__(self) -> tuple[Any, ...]:
        """Between processes numbers go as arrays: as lists, every one of them would be pickled by itself."""
        ids, log_probs = array("q", self.response_ids), array("d", self.log_probs)
        return _response, (ids, log_probs, self.finish_reason, self.policy_version, array("q", self.policy_versions))


def _response(
    ids: array[int], log_probs: array[float], reason: FinishReason, oldest: int, all_: array[int]
) -> Response:
    return Response(
        response_ids=ids.tolist(),
        log_probs=log_probs.tolist(),
        finish_reason=reason,
        policy_version=oldest,
        policy_versions=all_.tolist(),
    )


@dataclass(frozen=True, kw_only=True)
class Request:
    """One response to make. Equal ``prompt_ids`` share their prompt's cache; ``seed`` alone decides the draws.

    resume  a paused response to the same request, to go on from: its tokens count towards max_new_tokens, and the
            draws are those that it would have had without the pause
    """

    prompt_ids: Sequence[int]
    seed: int
    sampling: SamplingParams
    resume: Response | None = None


@dataclass
class RolloutStats:
    """Counted over one ``generate`` call."""

    prefill_tokens: int = 0
    cached_prompt_tokens: int = 0
    decode_steps: int = 0
    preemptions: int = 0
    extra: dict[str, float] = field(default_factory=dict)


class RolloutEngine(Protocol):
    """Generates with the weights of ``policy_version``."""

    policy_version: int
    stats: RolloutStats

    def generate(
        self, requests: Sequence[Request], *, should_pause: Callable[[], bool] | None = None
    ) -> list[Response]:
        """One response a request, in order. A request that can't fit raises ConfigError before any work.

        should_pause  asked every few tokens; once True, the call returns soon, unfinished responses as ABORT
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take new weights by parameter name; what was cached under the old ones is dropped."""
        ...

    def weights_changed(self, version: int) -> None:
        """The module's weights were updated in place: drop what was cached under the old ones."""
        ...

    def sleep(self) -> None:
        """Give the cache's memory back."""
        ...

    def wake(self) -> None:
        """Take it again."""
        ...
