from __future__ import annotations

import pytest

from verl.rewards.characters import characters


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("7", "7", 1.0),
        ("7", 7, 1.0),
        (" 7\n", "7", 1.0),
        ("73", "7", 0.5),  # one of two in place
        ("12", "123", 2 / 3),
        ("21", "12", 0.0),
        ("", "7", 0.0),
        ("7" * 100, "7", 0.01),  # length doesn't pay
        ("", "", 1.0),
    ],
)
def test_share_in_place(response: str, answer: object, score: float) -> None:
    assert characters(response, answer) == pytest.approx(score)
