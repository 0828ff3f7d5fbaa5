"""What a request must satisfy before any work: its prompt, its positions, its ids."""

from __future__ import annotations

from verl.batch import FinishReason
from verl.common.errors import ConfigError, DataError
from verl.models.causal_lm import CausalLM
from verl.models.loading import position_limits
from verl.rollout.base import Request


class RequestChecks:
    """Limits of one model."""

    def __init__(self, model: CausalLM) -> None:
        config = model.module.config.get_text_config()
        self._name, self._vocab_size = model.name, model.vocab_size
        self._limits = position_limits(config)

    def prompt(self, index: int, request: Request) -> list[int]:
        """The prompt's ids. Raises DataError for a bad prompt, ConfigError for a request that can't fit."""
        ids = [int(i) for i in request.prompt_ids]
        if not ids:
            raise DataError(f"request {index} has an empty prompt: generation needs at least one token to start from")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            bad = next(i for i in ids if not 0 <= i < self._vocab_size)
            raise DataError(f"request {index}: prompt id {bad} is outside the vocabulary of {self._vocab_size}")
        for stop_id in request.sampling.stop_token_ids:
            if not 0 <= stop_id < self._vocab_size:
                raise ConfigError(
                    f"stop_token_ids has {stop_id}, allowed are 0 to {self._vocab_size - 1} (the vocabulary)"
                )
        paused = request.resume
        if paused is not None and (
            paused.finish_reason is not FinishReason.ABORT
            or len(paused.response_ids) >= request.sampling.max_new_tokens
        ):
            raise ConfigError(
                f"request {index} resumes a response that ended by {paused.finish_reason.word} with "
                f"{len(paused.response_ids)} of {request.sampling.max_new_tokens} tokens: only one that was paused "
                "(abort) before its limit can go on"
            )
        total = len(ids) + request.sampling.max_new_tokens
        for key, limit in self._limits.items():
            if total > limit:
                raise ConfigError(
                    f"request {index}: a prompt of {len(ids)} tokens with max_new_tokens "
                    f"{request.sampling.max_new_tokens} needs {total} positions and {self._name!r} has {limit} "
                    f"({key}): lower max_response_tokens or the prompt limit"
                )
        return ids
