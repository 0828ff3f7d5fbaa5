from __future__ import annotations

from tests.ranks import run_ranks
from verl.common.ranks import is_distributed, is_first_rank, own_rank


def seen(rank: int) -> tuple[bool, int, bool]:
    return is_distributed(), own_rank(), is_first_rank()


def test_one_process_is_first_without_a_group() -> None:
    assert seen(0) == (False, 0, True)


def test_one_of_two_is_first() -> None:
    assert run_ranks(2, seen) == [(True, 0, True), (True, 1, False)]
