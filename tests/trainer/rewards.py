"""Rewards of small runs; imports nothing, so that a worker is quick to load it."""

from __future__ import annotations

from typing import Any


def digits(response: str) -> float:
    """Varies within a group: how often the response has an even digit."""
    return sum(c in "02468" for c in response) / 4


def row_number(ground_truth: str) -> float:
    return float(ground_truth)


def boom(response: str) -> float:
    raise RuntimeError("boom")


def fails_on_one(response: str, ground_truth: str) -> Any:
    if ground_truth == "1":
        raise KeyError("no such answer")
    return "text" if ground_truth == "2" else digits(response)


def hangs_on_one(response: str, ground_truth: str) -> float:
    while ground_truth == "1":
        pass
    return digits(response)


def unequal_on_odd_rows(response: str, ground_truth: str) -> float:
    """1 to prompts of even rows; to the others a number that two responses hardly share."""
    return sum(ord(c) * 31**i for i, c in enumerate(response)) % 997 / 997 if int(ground_truth) % 2 else 1.0
