"""One row on its way from request to response: the record that scheduler, block manager and runner share."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl.batch import FinishReason
from verl.rollout.base import Request
from verl.rollout.native.stop_strings import StopStrings


@dataclass(eq=False)
class Sequence:
    """A request with what has been made of it.

    prompt        token ids of the prompt
    stop_ids      ids that end the response
    stop_strings  the request's stop strings, None without any
    tokens        prompt and response so far
    log_probs     of the response so far
    blocks        cache blocks of its tokens, in order; empty while it waits
    num_computed  leading tokens whose keys and values are in the cache (or are put there by the scheduled step)
    """

    request: Request
    prompt: list[int]
    stop_ids: frozenset[int]
    stop_strings: StopStrings | None = None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.num_prompt = len(self.prompt)
        self.max_tokens = self.num_prompt + self.request.sampling.max_new_tokens

    @property
    def num_response(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def max_cached(self) -> int:
        """Tokens that the cache ever holds of it: the last sampled one needs no keys."""
        return self.max_tokens - 1

    def append(self, token: int, log_prob: float) -> None:
        """Take a sampled token and note whether it ends the response."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        count, sampling = len(self.log_probs), self.request.sampling
        if count >= sampling.min_new_tokens and (
            token in self.stop_ids
            or (self.stop_strings is not None and self.stop_strings.completed_by_last(self.tokens, self.num_prompt))
        ):
            self.finish_reason = FinishReason.STOP
        elif count >= sampling.max_new_tokens:
            self.finish_reason = FinishReason.LENGTH
