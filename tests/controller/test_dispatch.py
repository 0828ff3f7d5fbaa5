"""Rules on descriptions alone: who gets what, and what becomes of the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.controller.roles import Echo
from verl.common.errors import ConfigError, ShapeError
from verl.controller.dispatch import (
    Argument,
    Rule,
    broadcast,
    dispatch,
    every_rank,
    gather,
    last_stage,
    one_rank,
    rules_of,
    split_first,
    split_gather,
    split_rows,
    to_all,
)
from verl.controller.place import Grid
from verl.controller.results import Kept, Result

GRID = Grid(dp_size=2, tp_size=2, pp_size=2)


def cut(rule: Rule, *values: Any, grid: Grid = GRID) -> list[Any]:
    arguments: dict[str | int, Argument] = {i: Argument(Kept(value)) for i, value in enumerate(values)}
    return [part and [part[i].load() for i in range(len(values))] for part in rule.cut(arguments, grid)]


def join(rule: Rule) -> Any:
    results: Sequence[Result | None] = [Kept([rank]) for rank in range(8)]
    return rule.join(results, GRID).load()


def test_arguments() -> None:
    assert cut(broadcast, [1, 2]) == cut(gather, [1, 2]) == [[[1, 2]]] * 8
    assert cut(one_rank, 5) == [[5], *[None] * 7]
    rows = [[[1, 2], "x"]] * 4 + [[[3], "x"]] * 4
    assert cut(split_rows, [1, 2, 3], "x") == cut(last_stage, [1, 2, 3], "x") == rows
    assert cut(split_first, [1, 2, 3], "x") == rows


def test_results() -> None:
    assert join(broadcast) == join(one_rank) == [0]
    assert join(gather) == [[rank] for rank in range(8)]
    assert join(split_rows) == [0, 4]
    assert join(split_first) == [0]
    assert join(last_stage) == [2, 6]
    assert join(split_gather) == [[2], [6]]


def test_rows_that_differ() -> None:
    with pytest.raises(ShapeError, match=r"0: 2, 1: 3.*whole\(\.\.\.\)"):
        cut(split_rows, [1, 2], [1, 2, 3])


def test_a_rule_of_ones_own() -> None:
    def by_rank(arguments: Any, grid: Grid) -> list[Any]:
        return [{0: arguments[0].result.take(rank, rank + 1)} for rank in range(grid.world_size)]

    assert cut(Rule("by_rank", by_rank, every_rank), list("abcdefgh"))[3] == [["d"]]


def test_marks_are_inherited_and_overridden() -> None:
    class Other(Echo):
        @dispatch(gather)
        def add(self, rows: Sequence[int], more: int = 0) -> list[int]:
            return []

        def to_first(self, value: Any) -> Any:
            return value

    rules = rules_of(Other)
    assert rules["add"] is gather and rules["total"] is split_gather and "to_first" not in rules


def test_a_rule_hidden_by_a_method() -> None:
    with pytest.raises(ConfigError, match="takes a rule, such as split_rows"):
        dispatch(to_all)  # type: ignore[arg-type]
