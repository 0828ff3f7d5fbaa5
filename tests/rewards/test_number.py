from fractions import Fraction

import pytest

from verl.rewards.number import Number, last_number, number, number_at, to_number


def test_number_at_tells_absent_from_malformed() -> None:
    assert number_at("apples 5") == (False, None)
    assert number_at("1,2") == (True, None)
    assert number_at(" $1,200.50 left") == (True, Number(Fraction(240100, 200)))


def test_last_number_reads_the_whole_text() -> None:
    assert last_number("it is -3" + " and so on" * 1000) == Number(Fraction(-3))
    assert last_number("nothing") is None


def test_to_number_is_exact() -> None:
    assert to_number(0.1).value == Fraction(1, 10)
    assert to_number("10%") == Number(Fraction(10), is_percent=True)


@pytest.mark.parametrize(
    ("response", "score"), [("3.14", 1), ("3.15", 1), ("3.16", 0.25), ("-3.14", 0.25), ("none", 0), ("", 0)]
)
def test_reward(response: str, score: float) -> None:
    assert number(response, 3.14, tolerance=0.011, format_score=0.25) == score


def test_reward_is_exact_by_default() -> None:
    assert number("so 0.30", 0.3) == 1
    assert number("so 0.3000001", 0.3) == 0


def test_tolerance_includes_its_own_size() -> None:
    assert number("3.3", 3, tolerance=0.3) == 1
    assert number("3.31", 3, tolerance=0.3) == 0
