"""Numbers as people and models write them, compared as exact values; and the reward "number".

Text comes in, a ``Number`` or None goes out. Every scan is linear in the text and covers all of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

_MAX_CHARS = 100  # of one number: more digits than that are noise, and exact arithmetic on them is slow
_MAX_EXPONENT = 300
_CURRENCY = "$€£¥₹"
_MINUS = "-\u2212\u2013\u2010"  # hyphen-minus, minus sign, en dash, hyphen
_DIGITS = r"(?:\d|\.\d)[\d,.]*"
_NUMBER = re.compile(
    rf"(?P<digits>{_DIGITS})(?P<exponent>[eE][-+]?\d+)?(?P<over>(?:[ ]?/[ ]?\d[\d,.]*)*)(?P<percent>[ ]?\\?%)?",
    re.ASCII,
)
_FREE_NUMBER = re.compile(rf"(?<![A-Za-z_\d.,]){_NUMBER.pattern}", re.ASCII)
_PLAIN = re.compile(r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+", re.ASCII)
_LEAD = re.compile(r"(?:\\boxed\{|\\text\{|\\[(\[]|[\s:=*_`\"'(\[{])*")
_SIGN = re.compile(rf"[{_MINUS}+]?")
_AFTER_SIGN = re.compile(rf"(?:\\?[{_CURRENCY}]|\s)*")
# After a number: another one, joined by an alternative or an operator. Then the text names no single value.
_GOES_ON = re.compile(
    rf"[ \t]*(?:(?:or|and|to)\b|\\times|\\cdot|\\div|[{_MINUS}+*/\u00d7\u00f7xX^,;:|~])?[ \t]*\\?[{_CURRENCY}]?\.?\d",
    re.ASCII,
)
_HEDGED = re.compile(rf"\d\S{{0,9}}\s+or\s+\\?[{_MINUS}+{_CURRENCY}]{{0,2}}$", re.ASCII)


@dataclass(frozen=True)
class Number:
    """An exact value. ``is_percent``: written with a percent sign, which ``value`` doesn't take into account."""

    value: Fraction
    is_percent: bool = False

    def equals(self, other: Number, tolerance: float = 0.0) -> bool:
        """Whether both are the same value, up to ``tolerance`` (absolute).

        50% equals 50% and 0.5, and also a bare 50: where only one side has the sign, it may be just a unit.
        """
        allowed = [other.value]
        if self.is_percent and not other.is_percent:
            allowed.append(other.value * 100)
        elif other.is_percent and not self.is_percent:
            allowed.append(other.value / 100)
        return any(abs(self.value - value) <= Fraction(str(tolerance)) for value in allowed)


def number_at(text: str, start: int = 0) -> tuple[bool, Number | None]:
    """The number that ``text`` has at ``start``, after blanks, brackets, emphasis and currency signs.

    Returns whether something that begins like a number stands there, and its value; None when it is malformed
    ("1,2", "1.2.3") or one of several ("5 or 6", "5-6", "3 x 19").
    """
    at = _end(_LEAD, text, start)
    at = _end(_AFTER_SIGN, text, at)
    sign = text[at : _end(_SIGN, text, at)]
    at = _end(_AFTER_SIGN, text, at + len(sign))
    match = _NUMBER.match(text, at)
    return match is not None, _value(text, match, bool(sign) and sign in _MINUS) if match else None


def last_number(text: str) -> Number | None:
    """The last number anywhere in ``text``; None when there is none, or the last is malformed or hedged ("5 or 6")."""
    match = None
    for match in _FREE_NUMBER.finditer(text):  # noqa: B007  # the last one is wanted
        pass
    if match is None or _HEDGED.search(text[max(0, match.start() - 24) : match.start()]):
        return None
    return _value(text, match, _is_negative(text, match.start()))


def to_number(value: Any) -> Number:
    """A ground truth as a number: int, float, Decimal, Fraction, one-element array, "72", "$1,234", "50%",
    or a worked solution that ends in "#### 72".

    Raises ValueError when it is none.
    """
    if hasattr(value, "item") and hasattr(value, "shape") and not isinstance(value, str):
        value = value.item()
    if isinstance(value, (int, float, Decimal, Fraction)) and not isinstance(value, bool):
        try:
            return Number(Fraction(str(value)))
        except ValueError:
            raise ValueError(f"ground_truth {value!r} isn't a finite number") from None
    if isinstance(value, str):
        answer = value.rpartition("####")[2].strip()
        found, number = number_at(answer)
        if found and number is not None and not re.search(r"\d", answer[_number_end(answer) :]):
            return number
    raise ValueError(f"ground_truth must be a number or end in '#### number', got {value!r}")


def number(response: str, ground_truth: Any, tolerance: float = 0.0, format_score: float = 0.0) -> float:
    """1 where the last number of the response equals the ground truth.

    tolerance     largest absolute difference that still counts as equal
    format_score  given for another number than the ground truth; no number at all scores 0
    """
    truth, answer = to_number(ground_truth), last_number(response)
    if answer is None:
        return 0.0
    return 1.0 if answer.equals(truth, tolerance) else format_score


def _value(text: str, match: re.Match[str], is_negative: bool) -> Number | None:
    """The value of a match of _NUMBER, or None."""
    written = match["digits"]
    if len(match[0]) > _MAX_CHARS:
        return None
    digits = written.rstrip(".,")  # the end of a sentence or clause
    is_cut = len(digits) < len(written)
    if is_cut and (match["exponent"] or match["over"] or match["percent"]):
        return None
    if _GOES_ON.match(text, match.start() + len(digits) if is_cut else match.end()):
        return None
    factors = [_plain(part.strip()) for part in [digits, *match["over"].split("/")[1:]]]
    if len(factors) > 2 or None in factors or factors[1:] == [0]:
        return None
    exponent = int((match["exponent"] or "e0")[1:])
    if abs(exponent) > _MAX_EXPONENT:
        return None
    top, bottom = [x for x in factors if x is not None] + [Fraction(1)] * (2 - len(factors))
    value = top * Fraction(10) ** exponent / bottom
    return Number(-value if is_negative else value, bool(match["percent"]))


def _plain(digits: str) -> Fraction | None:
    digits = digits.rstrip(".,")
    return Fraction(digits.replace(",", "")) if _PLAIN.fullmatch(digits) else None


def _is_negative(text: str, at: int) -> bool:
    """Whether a minus sign, not a minus between two values, stands before the number at ``at``."""
    while at and text[at - 1] in _CURRENCY + "\\":
        at -= 1
    if not at or text[at - 1] not in _MINUS:
        return False
    before = text[at - 2 : at - 1]
    return not (before.isalnum() or before in tuple(")]}%"))


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _number_end(text: str) -> int:
    match = _NUMBER.search(text)
    return match.end() if match else 0
