import json
import time
from pathlib import Path

import numpy
import pytest

from verl.rewards.gsm8k import gsm8k

SAME_TEXT_AFTER = "x" * 490


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("so 19 x 3 = 57\n#### 57" + SAME_TEXT_AFTER, 57, 1),
        ("#### 57 " + "and that is all. " * 60, "57", 1),
        ("#### 57\n1. first I took 3\n2. then 4", 57, 1),
        ("#### 1,234", "1234", 1),
        ("#### 1234", "1,234", 1),
        ("#### 1,234,567.50", 1234567.5, 1),
        ("#### $18.00", "18", 1),
        ("#### -7", "7", 0),
        ("#### -7", "-7", 1),
        ("#### 7", "-7", 0),
        ("#### -$5", -5, 1),
        ("#### $-5", -5, 1),
        ("#### \u22127", -7, 1),
        ("#### +7", 7, 1),
        ("#### 72.", "72", 1),
        ("#### 42.0", "42", 1),
        ("#### 007", 7, 1),
        ("#### .5", 0.5, 1),
        ("#### 1/2", 0.5, 1),
        ("#### 1e3", 1000, 1),
        ("####57", 57, 1),
        ("#### **57**", 57, 1),
        ("#### $57$", 57, 1),
        ("#### \\boxed{57}", 57, 1),
        ("#### 57 apples", 57, 1),
        ("#### 57-year-old", 57, 1),
        ("#### 5 ... no, #### 6", 6, 1),
        ("#### 5 ... no, #### 6", 5, 0),
        ("#### 72\n####", 72, 1),
        ("#### 50%", 50, 1),
        ("#### 50%", 0.5, 1),
        ("#### 50", "50%", 1),
        ("#### 0.5%", "50%", 0),
        ("#### 72", "720", 0),
        ("#### 720", "72", 0),
        ("#### 7.2", "72", 0),
        ("#### 1,2", "12", 0),
        ("#### 1,2", "1", 0),
        ("#### 1.234,56", 1.234, 0),
        ("#### 1.2.3", 1.2, 0),
        ("#### 5 or 6", 5, 0),
        ("#### 5 or 6", 6, 0),
        ("#### 5, 6, 7", 5, 0),
        ("#### 5-6", 5, 0),
        ("#### 60 - 3", 60, 0),
        ("#### 60 - 3", 57, 0),
        ("#### 3 x 19", 3, 0),
        ("#### 1/0", 0, 0),
        ("#### 1e999999999999", 1, 0),
        ("##### 57", 57, 0),
        ("the answer is 57", 57, 0),
        ("", 57, 0),
        ("####", 57, 0),
    ],
)
def test_strict(response: str, truth: object, score: float) -> None:
    assert gsm8k(response, truth) == score


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("the answer is 57", 57, 1),
        ("the answer is 57.", 57, 1),
        ("the answer is $1,234.50!", 1234.5, 1),
        ("the answer is 1/2", 0.5, 1),
        ("x = -7", -7, 1),
        ("x = -7", 7, 0),
        ("x = -$7", -7, 1),
        ("which is 10-7", 7, 1),
        ("first 56, then 57", 56, 0),
        ("#### 56, but I think 57", 57, 0),
        ("the answer is 5 or 6", 6, 0),
        ("the answer is 1,2", 2, 0),
        ("it is H2O", 2, 0),
        ("no idea", 57, 0),
        ("", 57, 0),
    ],
)
def test_flexible(response: str, truth: object, score: float) -> None:
    assert gsm8k(response, truth, mode="flexible") == score


@pytest.mark.parametrize(
    "truth", [57, 57.0, "57", "57.00", "$57", "57 apples", "3 x 19 = 57\n#### 57", numpy.int64(57)]
)
def test_forms_of_the_ground_truth(truth: object) -> None:
    assert gsm8k("#### 57", truth) == 1
    assert gsm8k("#### 58", truth) == 0


@pytest.mark.parametrize("truth", [None, True, "", "five", "5 or 6", "1,2", float("nan"), float("inf"), [57]])
def test_a_ground_truth_that_is_no_number_is_an_error(truth: object) -> None:
    with pytest.raises(ValueError, match="ground_truth"):
        gsm8k("#### 57", truth)


def test_format_score_is_for_another_number_in_the_right_form() -> None:
    assert [gsm8k(r, 57, format_score=0.1) for r in ("#### 57", "#### 58", "58", "#### 5 or 6")] == [1, 0.1, 0, 0]


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match="strict"):
        gsm8k("#### 57", 57, mode="loose")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "unit",
    ["9", "1,", "#### ", "#### 5\n", "1/", "- ", "#", "1 or ", "1e", "\\boxed{", "$", "1.", " ", "1 / ", "#### \\("],
)
def test_a_million_characters_take_no_time(unit: str) -> None:
    start = time.perf_counter()
    gsm8k(unit * (1_000_000 // len(unit)), 57, mode="flexible")
    gsm8k("####" + unit * (1_000_000 // len(unit)), 57)
    assert time.perf_counter() - start < 3


def test_every_worked_solution_is_its_own_answer() -> None:
    path = Path(__file__).parents[3] / "shared/data/gsm8k/test.jsonl"
    if not path.exists():
        pytest.skip("no GSM8K beside the checkout")
    answers = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
    plain = [answer.rpartition("#### ")[2].replace(",", "") for answer in answers]
    assert all(gsm8k(answer, number) == 1 for answer, number in zip(answers, plain, strict=True))
    other = [gsm8k(answer, int(number) + 1) for answer, number in zip(answers, plain, strict=True)]
    assert sum(other) == 0
