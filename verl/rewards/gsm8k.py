"""Grade-school maths: a response that ends in "#### 72" against a number.

Values are compared, not texts: 1,234 = 1234, $18.00 = 18, 72. = 72, -7 is not 7. The whole response is read, and
the last marker wins.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from verl.rewards.number import Number, last_number, number_at, to_number

_MARKER = re.compile(r"(?<!#)####(?!#)")


def gsm8k(
    response: str,
    ground_truth: Any,
    mode: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
) -> float:
    """1 where the response's answer has the value of the ground truth.

    ground_truth  a number, its text, or a worked solution that ends in "#### 72"
    mode          "strict": the number right after the last "####" that is followed by one; what comes after it
                  doesn't matter, unless it makes the answer another value ("5 or 6", "60 - 3", "1,2").
                  "flexible": the same, or the last number of the response where no "####" has a number
    format_score  given for an answer in the right form with another value
    Raises ValueError when the ground truth is no number.
    """
    if mode not in ("strict", "flexible"):
        raise ValueError(f"mode must be 'strict' or 'flexible', got {mode!r}")
    truth = to_number(ground_truth)
    found, answer = marked_number(response)
    if not found and mode == "flexible":
        answer = last_number(response)
    if answer is None:
        return 0.0
    return 1.0 if answer.equals(truth) else format_score


def marked_number(response: str) -> tuple[bool, Number | None]:
    """Whether a "####" is followed by something like a number, and the value after the last such one (or None)."""
    for end in reversed([marker.end() for marker in _MARKER.finditer(response)]):
        found, value = number_at(response, end)
        if found:
            return True, value
    return False, None
