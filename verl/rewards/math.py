r"""Mathematics of any kind: the answer in the last ``\boxed{}`` against a ground truth, by symbolic equality.

The comparison is math-verify's. Its own time limits work by a signal that only the main thread may set, so they are
off here: the runner's workers end a comparison that takes too long.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Literal

import math_verify
from math_verify import ExprExtractionConfig, LatexExtractionConfig

from verl.rewards.gsm8k import marked_number
from verl.rewards.number import last_number, number_at, to_number

_MAX_CHARS = 2000  # of an answer; parsing a longer one would take minutes
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
_BOX = re.compile(r"\\(?:boxed|fbox)\b\s*")
_DELIMITERS = (("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_ANNOUNCED = re.compile(r"\banswer(?:\s+is\b\s*:?|\s*[:=])[\s*]*", re.IGNORECASE)
_WRAPPER = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\{([^{}]*)\}")

for _name in ("math_verify.parser", "math_verify.grader"):  # they warn, once, that their time limits are off
    logging.getLogger(_name).setLevel(logging.ERROR)


def math(
    response: str,
    ground_truth: Any,
    mode: Literal["strict", "flexible"] = "flexible",
    format_score: float = 0.0,
) -> float:
    r"""1 where the response's answer equals the ground truth as mathematics: ``\frac{1}{2}`` = 0.5 = ``\boxed{1/2}``.

    ground_truth  LaTeX or a plain expression, with or without ``\boxed{}`` or dollars; or a number
    mode          "strict": the last ``\boxed{}`` or ``\fbox{}`` of the response.
                  "flexible": the same; without a box the number after "####", or else the last formula or number
    format_score  given for an answer in the right form with another value
    Raises ValueError when the ground truth is empty.
    """
    if mode not in ("strict", "flexible"):
        raise ValueError(f"mode must be 'strict' or 'flexible', got {mode!r}")
    truth = _truth(ground_truth)
    answer = boxed(response)
    if answer is None and mode == "flexible":
        found, number = marked_number(response)
        answer = str(number.value) if number else None if found else _unmarked(response)
    if answer is None or not answer.strip() or len(answer) > max(_MAX_CHARS, 4 * len(truth)):
        return 0.0
    return 1.0 if is_equal(truth, answer) else format_score


def boxed(text: str) -> str | None:
    r"""What the last ``\boxed{...}`` or ``\fbox{...}`` holds; None without one, "" when its brace never closes."""
    last = None
    for last in _BOX.finditer(text):  # noqa: B007  # the last one is wanted
        pass
    if last is None:
        return None
    if text[last.end() : last.end() + 1] != "{":
        return text[last.end() : last.end() + 40].split("$")[0].split()[0] if text[last.end() :].strip() else ""
    depth = 0
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, last.end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[last.end() + 1 : brace.start()]
    return ""


def is_equal(truth: str, answer: str) -> bool:
    """Whether two expressions are the same text or the same mathematics. ``truth`` decides the form of comparison."""
    if _plain_text(truth) == _plain_text(answer):
        return True
    gold, target = _parse(truth), _parse(answer)
    return bool(gold and target and math_verify.verify(gold, target, timeout_seconds=None))


def _truth(value: Any) -> str:
    """A ground truth as one expression."""
    if not isinstance(value, str):
        return str(to_number(value).value)
    text = value.rpartition("####")[2] if "####" in value else value
    inner = boxed(text)
    text = (text if inner is None else inner).strip().removeprefix("$").removesuffix("$").strip()
    if not text:
        raise ValueError(f"ground_truth is empty: {value!r}")
    return text


def _unmarked(text: str) -> str | None:
    """What follows the last "answer is" or "answer:"; else the last formula or number, whichever comes later."""
    announced = None
    for announced in _ANNOUNCED.finditer(text):  # noqa: B007  # the last one is wanted
        pass
    if announced is not None:
        said = text[announced.end() : announced.end() + _MAX_CHARS].split("\n")[0]
        is_number, value = number_at(said)
        if is_number:
            return str(value.value) if value else None
        formula, end = _last_formula(said)
        return said.strip(" .*") if formula is None else formula
    formula, end = _last_formula(text)
    number = last_number(text[end:])
    return formula if number is None else str(number.value)


def _last_formula(text: str) -> tuple[str | None, int]:
    """The last formula between dollars or LaTeX brackets, and where it ends; (None, 0) without one."""
    best, best_end = None, 0
    for opening, closing in _DELIMITERS:
        end = text.rfind(closing)
        if end > 0 and text[end - 1 : end + 1] == "$$":
            end -= 1
        start = text.rfind(opening, 0, max(end, 0))
        if start >= 0 and end + len(closing) > best_end and text[start + len(opening) : end].strip():
            best, best_end = text[start + len(opening) : end], end + len(closing)
    return best, best_end


def _parse(text: str) -> list[Any]:
    parsed: list[Any] = math_verify.parse(f"\\boxed{{{text}}}", _EXTRACTION, parsing_timeout=None)
    return parsed


def _plain_text(text: str) -> str:
    return "".join(_WRAPPER.sub(r"\1", text).replace("$", "").split()).rstrip(".").casefold()
