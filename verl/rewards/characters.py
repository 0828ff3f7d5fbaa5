"""The reward "characters": how much of a short answer is in place, a shaped signal for models that know nothing yet."""

from __future__ import annotations


def characters(response: str, ground_truth: object) -> float:
    """Share of positions at which response and answer have the same character, over the longer of the two.

    1 where they are equal, also where both are empty; surrounding blanks don't count.
    """
    given, wanted = response.strip(), str(ground_truth).strip()
    longest = max(len(given), len(wanted))
    return sum(a == b for a, b in zip(given, wanted, strict=False)) / longest if longest else 1.0
