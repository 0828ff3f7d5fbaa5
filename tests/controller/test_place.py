"""Ranks and coordinates, numbered with tensor parallel fastest and the copies slowest."""

from __future__ import annotations

import pytest

from verl.common.errors import ConfigError
from verl.controller.place import Layout


def test_ranks_and_coordinates() -> None:
    grid = Layout(tp_size=2, pp_size=2).on(8)
    assert (grid.dp_size, grid.world_size) == (2, 8)
    places = [grid.place(rank, node=0, local_rank=rank, device="cpu", rendezvous=None) for rank in range(8)]
    assert [p.tp_rank for p in places] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [p.dp_rank for p in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [p.pp_rank for p in places] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert grid.rank(1, tp_rank=1, pp_rank=1) == 7
    assert all(grid.rank(p.dp_rank, tp_rank=p.tp_rank, pp_rank=p.pp_rank) == p.rank for p in places)


@pytest.mark.parametrize("layout, size", [(Layout(tp_size=2), 3), (Layout(tp_size=2, pp_size=2), 2)])
def test_sizes_that_do_not_divide(layout: Layout, size: int) -> None:
    with pytest.raises(ConfigError, match=f"{size} devices can't hold copies"):
        layout.on(size)


def test_sizes_below_one() -> None:
    with pytest.raises(ConfigError, match="tp_size=0"):
        Layout(tp_size=0).on(1)
