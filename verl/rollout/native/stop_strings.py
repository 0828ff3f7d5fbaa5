"""Strings that end a response, found in the decoded text as tokens come in.

Takes token ids and a tokenizer; knows nothing of rows or sampling. Special tokens are part of the text, so that
``<|im_end|>`` given as a string is found too. The prompt's text is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.common.errors import ConfigError

_MARGIN = 8  # tokens decoded before those that can hold the string: their text may be cut at the front


class StopStrings:
    """``strings`` under ``tokenizer`` (anything with transformers' ``decode``)."""

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        if tokenizer is None:
            raise ConfigError(
                f"stop strings {list(strings)!r} need a tokenizer, and the engine was built without one: give it a "
                "tokenizer or use stop_token_ids"
            )
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._tail = max(len(s.encode()) for s in strings) + _MARGIN  # a token holds a byte or more of the text

    def completed_by_last(self, tokens: Sequence[int], start: int) -> bool:
        """Whether the last of ``tokens`` completes a string that lies in the text of ``tokens[start:]``."""
        tail = list(tokens[max(start, len(tokens) - self._tail) :])
        text = self._decode(tail)
        found = [s for s in self._strings if s in text]
        if not found:
            return False
        known = _common_length(text, self._decode(tail[:-1]))
        return any(text.find(s, max(0, known - len(s) + 1)) >= 0 for s in found)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def _common_length(a: str, b: str) -> int:
    """Characters that both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
