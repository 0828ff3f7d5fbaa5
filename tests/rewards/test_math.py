import threading
import time

import pytest

from verl.rewards.math import boxed, math

CASES = [
    (r"\boxed{\frac{2}{7}}", "2/7", 1),
    (r"\boxed{\frac27}", r"\frac{2}{7}", 1),
    (r"\boxed{\frac{2}{7}}", "2/9", 0),
    (r"\boxed{3}, no, \boxed{4}", "4", 1),
    (r"\boxed{3}, no, \boxed{4}", "3", 0),
    (r"\boxed{0.5}", r"\frac12", 1),
    (r"\boxed{1,234}", "1234", 1),
    (r"\boxed{1234}", "1,234", 1),
    (r"\boxed{12}", "1,2", 0),
    (r"\boxed{1,2}", "12", 0),
    (r"\boxed{72}", "720", 0),
    (r"\boxed{-7}", 7, 0),
    (r"\boxed{-7}", -7, 1),
    (r"\boxed{x=5}", "5", 1),
    (r"\boxed{3 or 4}", "3", 0),
    (r"\boxed{1,2,3}", "3", 0),
    (r"\boxed{(1,2)}", "(1,2)", 1),
    (r"\boxed{(2,1)}", "(1,2)", 0),
    (r"\boxed{\{1,2\}}", r"\{2,1\}", 1),
    (r"\boxed{[0,1]}", "[0,1)", 0),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
    (r"\boxed{\sqrt{8}}", r"2\sqrt2", 1),
    (r"\boxed{3.14}", r"\pi", 0),
    (r"\boxed{\text{(B)}}", "(B)", 1),
    (r"\boxed{Tuesday}", "Monday", 0),
    (r"\fbox{5}", "5", 1),
    (r"\boxed 5", "5", 1),
    (r"\boxed{5", "5", 0),
    (r"\boxed{}", "5", 0),
    ("", "5", 0),
    (r"\boxed{5}" + " so" * 1000, "5", 1),
    (r"\boxed{\frac{1}{2}}", 0.5, 1),
    (r"\boxed{18}", "She has\n#### 18", 1),
    (r"\boxed{5}", r"$\boxed{5}$", 1),
    ("#### 18", "18", 1),
    ("#### 1,2", "12", 0),
    ("The answer is 1/2", "0.5", 1),
    ("**Answer:** 5, since 2 + 3 = 5", "5", 1),
    (r"so $x = \frac{1}{2}$.", "1/2", 1),
    (r"so $x = \frac{1}{2}$.", "1/3", 0),
    ("costs $5 and $10", "10", 1),
]


@pytest.mark.parametrize(("response", "truth", "score"), CASES)
def test_cases(response: str, truth: object, score: float) -> None:
    assert math(response, truth) == score


def test_same_in_another_thread() -> None:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.extend(math(r, t) for r, t, _ in CASES))
    thread.start()
    thread.join()
    assert scores == [score for _, _, score in CASES]


def test_strict_wants_a_box() -> None:
    assert math("the answer is 5", 5, mode="strict") == 0
    assert math(r"\boxed{5}", 5, mode="strict") == 1


def test_boxed_matches_braces() -> None:
    assert boxed(r"\boxed{\frac{1}{2}} done") == r"\frac{1}{2}"
    assert boxed(r"\boxed{\{1\}}") == r"\{1\}"
    assert boxed("none") is None


def test_empty_ground_truth_is_an_error() -> None:
    with pytest.raises(ValueError, match="ground_truth"):
        math(r"\boxed{5}", "")
    with pytest.raises(ValueError, match="ground_truth"):
        math(r"\boxed{5}", None)


@pytest.mark.parametrize(
    "unit", ["$", "\\(", "\\[x", "$1 ", "\\boxed{", "\\boxed ", "answer is ", "answer ", "9", " ", "{"]
)
def test_a_million_characters_take_no_time(unit: str) -> None:
    start = time.perf_counter()
    assert math(unit * (1_000_000 // len(unit)), 5) == 0
    assert math("\\boxed{" + unit * (1_000_000 // len(unit)), 5) == 0
    assert time.perf_counter() - start < 3
