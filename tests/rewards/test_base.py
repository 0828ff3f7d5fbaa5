import math
from decimal import Decimal
from fractions import Fraction

import numpy
import pytest
import torch

from verl.rewards.base import Reward, RewardItem, as_result


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (True, 1.0),
        (False, 0.0),
        (3, 3.0),
        (-0.35, -0.35),
        (numpy.float32(0.5), 0.5),
        (numpy.bool_(True), 1.0),
        (numpy.array(2), 2.0),
        (torch.tensor(0.25), 0.25),
        (torch.tensor([2]), 2.0),
        (Fraction(1, 2), 0.5),
        (Decimal("0.5"), 0.5),
    ],
)
def test_numbers_are_scores(value: object, score: float) -> None:
    for result in (as_result(value), as_result({"score": value}), as_result(Reward(value))):  # type: ignore[arg-type]
        assert (result.score, result.failure) == (score, None)
        assert type(result.score) is float


NONSENSE = [None, math.nan, math.inf, -math.inf, 1e39, 10**400, "1", b"1", [1.0], (1,), {}, 1j, object(),
            torch.tensor([1.0, 2.0]), torch.tensor(math.nan), numpy.array([]), numpy.array("1")]  # fmt: skip


@pytest.mark.parametrize("value", NONSENSE)
def test_nonsense_is_no_score(value: object) -> None:
    for result in (as_result(value), as_result({"score": value}), as_result(Reward(value))):  # type: ignore[arg-type]
        assert (result.score, result.failure) == (None, "invalid")
        assert result.detail


def test_a_dict_needs_a_score() -> None:
    result = as_result({"acc": 1.0})
    assert result.failure == "invalid"
    assert "acc" in result.detail


def test_numeric_entries_are_parts() -> None:
    result = as_result({"score": 1, "format": 0.5, "acc": True, "pred": "57", "nan": math.nan})
    assert result.parts == {"format": 0.5, "acc": 1.0}
    assert "nan" in result.detail
    assert as_result(Reward(1.0, {"format": 0.5})).parts == {"format": 0.5}


def test_the_items_own_fields_win() -> None:
    item = RewardItem(prompt="p", response="r", row={"response": "stale", "level": 3})
    assert item.fields() == {"prompt": "p", "response": "r", "ground_truth": None, "level": 3}
