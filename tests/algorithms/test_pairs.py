from __future__ import annotations

import pytest
import torch
from torch import Tensor

from verl.algorithms.pairs import pair_rows
from verl.common.errors import MissingField, ShapeError


def columns(pair_id: list[int], is_chosen: list[bool]) -> dict[str, Tensor]:
    return {"pair_id": torch.tensor(pair_id, dtype=torch.int64), "is_chosen": torch.tensor(is_chosen, dtype=torch.bool)}


def test_rows_in_any_order_find_their_partners() -> None:
    chosen, rejected = pair_rows(columns([8, 3, 3, 5, 8, 5], [True, False, True, True, False, False]))
    assert (chosen.tolist(), rejected.tolist()) == ([2, 3, 0], [1, 5, 4])
    chosen, rejected = pair_rows(columns([], []))
    assert (chosen.tolist(), rejected.tolist()) == ([], [])


@pytest.mark.parametrize(
    ("pair_id", "is_chosen"),
    [([1], [True]), ([1, 2], [True, False]), ([1, 1], [True, True]), ([1, 1, 1, 1], [True, True, False, False])],
)
def test_a_row_without_its_one_partner_is_refused(pair_id: list[int], is_chosen: list[bool]) -> None:
    with pytest.raises(ShapeError, match="one chosen and one rejected row each"):
        pair_rows(columns(pair_id, is_chosen))


def test_a_missing_column_is_named() -> None:
    with pytest.raises(MissingField, match=r"is_chosen.*data writes it"):
        pair_rows({"pair_id": torch.tensor([1])})
