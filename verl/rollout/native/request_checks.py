"""What a request must satisfy before any work: its prompt, its positions, its ids."""

from __future__ import annotations

from collections.abc import Sequence

from verl.batch import FinishReason
from verl.common.errors import ConfigError, DataError
from verl.models.causal_lm import CausalLM
from verl.models.loading import position_limits
from verl.rollout.base import Request, Response


class RequestChecks:
    """Limits of one model."""

    def __init__(self, model: CausalLM) -> None:
        config = model.module.config.get_text_config()
        self._name, self._vocab_size = model.name, model.vocab_size
        self._limits = position_limits(config)

    def prompt(self, index: int, request: Request) -> list[int]:
        """The prompt's ids. Raises DataError for bad ids, ConfigError for a request that can't fit or go on."""
        ids = [int(i) for i in request.prompt_ids]
        if not ids:
            raise DataError(f"request {index} has an empty prompt: generation needs at least one token to start from")
        self._ids(index, "prompt", ids)
        for stop_id in request.sampling.stop_token_ids:
            if not 0 <= stop_id < self._vocab_size:
                raise ConfigError(
                    f"stop_token_ids has {stop_id}, allowed are 0 to {self._vocab_size - 1} (the vocabulary)"
                )
        if request.resume is not None:
            self._resumed(index, request.resume, request.sampling.max_new_tokens)
        total = len(ids) + request.sampling.max_new_tokens
        for key, limit in self._limits.items():
            if total > limit:
                raise ConfigError(
                    f"request {index}: a prompt of {len(ids)} tokens with max_new_tokens "
                    f"{request.sampling.max_new_tokens} needs {total} positions and {self._name!r} has {limit} "
                    f"({key}): lower max_response_tokens or the prompt limit"
                )
        return ids

    def _resumed(self, index: int, paused: Response, limit: int) -> None:
        made = len(paused.response_ids)
        if paused.finish_reason is not FinishReason.ABORT or made >= limit:
            raise ConfigError(
                f"request {index} resumes a response that ended by {paused.finish_reason.word} with {made} of {limit} "
                "tokens: only one that was paused (abort) before its limit can go on"
            )
        if not made == len(paused.log_probs) == len(paused.policy_versions):
            raise DataError(
                f"request {index} resumes a response of {made} tokens with {len(paused.log_probs)} log-probs and "
                f"{len(paused.policy_versions)} policy versions: there is one of each for every token"
            )
        self._ids(index, "resumed", paused.response_ids)

    def _ids(self, index: int, kind: str, ids: Sequence[int]) -> None:
        if ids and (min(ids) < 0 or max(ids) >= self._vocab_size):
            bad = next(i for i in ids if not 0 <= i < self._vocab_size)
            raise DataError(f"request {index}: {kind} id {bad} is outside the vocabulary of {self._vocab_size}")
