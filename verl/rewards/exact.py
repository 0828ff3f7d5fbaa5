"""A response that must be the ground truth, character for character."""

from __future__ import annotations

from typing import Any


def exact(response: str, ground_truth: Any, strip: bool = True, ignore_case: bool = False) -> float:
    """1 where the response is the text of the ground truth, or of one of them where it is a list or tuple.

    strip        blanks around both don't count
    ignore_case  upper and lower case are the same
    """
    truths = ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]
    return float(_form(response, strip, ignore_case) in [_form(str(truth), strip, ignore_case) for truth in truths])


def _form(text: str, strip: bool, ignore_case: bool) -> str:
    text = text.strip() if strip else text
    return text.casefold() if ignore_case else text
