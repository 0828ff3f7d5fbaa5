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
    tokens        prompt and response so far, as far as the host has seen it
    log_probs     of the response so far
    versions      weights that sampled each token of the response so far
    blocks        cache blocks of its tokens, in order; empty while it waits
    num_computed  leading tokens whose keys and values are in the cache (or are put there by the scheduled step)
    in_flight     steps launched for it whose results the host hasn't seen
    """

    request: Request
    prompt: list[int]
    stop_ids: frozenset[int]
    stop_strings: StopStrings | None = None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    in_flight: int = 0
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.num_prompt = len(self.prompt)
        self.max_tokens = self.num_prompt + self.request.sampling.max_new_tokens
        if self.request.resume is not None:
            self.tokens += self.request.resume.response_ids
            self.log_probs = list(self.request.resume.log_probs)
            self.versions = list(self.request.resume.policy_versions)

    @property
    def num_response(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def max_cached(self) -> int:
        """Tokens that the cache ever holds of it: the last sampled one needs no keys."""
        return self.max_tokens - 1

    @property
    def remaining(self) -> int:
        """Tokens that it may still sample besides those in flight."""
        return self.max_tokens - len(self.tokens) - self.in_flight

    def take(self, tokens: list[int], log_probs: list[float], version: int) -> None:
        """Take sampled tokens as far as the response's end, and note whether that was reached."""
        count = len(tokens) if self.stop_strings is None else self._until_stop_string(tokens, self.stop_strings)
        self.tokens += tokens[:count]
        self.log_probs += log_probs[:count]
        self.versions += [version] * count
        self.num_computed = len(self.tokens) - 1
        if self.finish_reason is not None or not count:
            return
        sampling = self.request.sampling
        if self.num_response >= sampling.min_new_tokens and self.tokens[-1] in self.stop_ids:
            self.finish_reason = FinishReason.STOP
        elif self.num_response >= sampling.max_new_tokens:
            self.finish_reason = FinishReason.LENGTH

    def _until_stop_string(self, tokens: list[int], strings: StopStrings) -> int:
        """How many of ``tokens`` come before the end that a stop string makes, the completing one counted."""
        text = list(self.tokens)
        for i, token in enumerate(tokens):
            text.append(token)
            made = len(text) - self.num_prompt
            if made >= self.request.sampling.min_new_tokens and strings.completed_by_last(text, self.num_prompt):
                self.finish_reason = FinishReason.STOP
                return i + 1
        return len(tokens)
