"""Dispatch rules: how the arguments of a call are cut for the ranks, and how their results are put together.

A rule is two functions. Both handle descriptions of values (``results.py``), so no rule moves a byte. A role's method
is marked with one where it is defined::

    class Scorer:
        @dispatch(split_rows)
        def score(self, batch): ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from verl.common.errors import ConfigError, ShapeError, did_you_mean
from verl.controller.place import Grid
from verl.controller.results import Joined, Listed, Result, shards

_RULE = "_verl_dispatch_rule"
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Whole:
    """An argument that is not to be cut: ``group.generate(prompts, stop=whole(["A", "B"]))``."""

    value: Any


def whole(value: Any) -> Whole:
    """Mark an argument that has rows, but goes to every rank as it is."""
    return Whole(value)


@dataclass(frozen=True)
class Argument:
    """One argument of a call. ``is_whole``: its rows aren't to be cut."""

    result: Result
    is_whole: bool = False


Arguments = Mapping[str | int, Argument]
"""The arguments of a call by position or name."""
RankArguments = Mapping[str | int, Result]
"""The arguments of one rank."""
Cut = Callable[[Arguments, Grid], Sequence[RankArguments | None]]
"""Arguments for each rank; None where a rank is left out."""
Join = Callable[[Sequence[Result | None], Grid], Result]
"""Results of all ranks, None where one was left out -> the result of the call."""


@dataclass(frozen=True)
class Rule:
    """How a call goes to the ranks of a group and back.

    is_joint  whether the ranks talk to each other in the method, see ``joint``
    """

    name: str
    cut: Cut
    join: Join
    is_joint: bool = False


def joint(rule: Rule) -> Rule:
    """``rule`` for a method in which the ranks talk to each other.

    Where one of several raises, the others may wait for it for ever, or take what it says next for the answer to what
    they asked: all workers end.
    """
    return replace(rule, is_joint=True)


def dispatch(rule: Rule) -> Callable[[_F], _F]:
    """Mark a method as one that a worker group offers, called by ``rule``. Raises ConfigError for what is no rule."""
    if not isinstance(rule, Rule):
        raise ConfigError(
            f"dispatch(...) takes a rule, such as split_rows, got {rule!r}; in a class, a method of its name hides it"
        )

    def mark(method: _F) -> _F:
        setattr(method, _RULE, rule)
        return method

    return mark


def rules_of(role: type) -> dict[str, Rule]:
    """The rules of the methods of ``role`` that are marked. Raises ConfigError when none is."""
    members = {name: member for base in reversed(role.__mro__) for name, member in vars(base).items()}
    rules = {name: vars(member)[_RULE] for name, member in members.items() if _is_marked(member)}
    if not rules:
        raise ConfigError(f"role {role.__name__} offers no method: mark those to be called with @dispatch(rule)")
    return rules


def _is_marked(member: object) -> bool:
    return inspect.isfunction(member) and _RULE in vars(member)


def rule_named(rules: Mapping[str, Rule], role: str, method: str) -> Rule:
    """The rule of a method. Raises AttributeError naming the nearest one."""
    if method not in rules:
        raise AttributeError(
            f"role {role!r} offers no method {method!r}{did_you_mean(method, rules)}; offered: {sorted(rules)}"
        )
    return rules[method]


def to_all(arguments: Arguments, grid: Grid) -> list[RankArguments | None]:
    """Every rank gets everything."""
    same = {key: argument.result for key, argument in arguments.items()}
    return [same] * grid.world_size


def to_first(arguments: Arguments, grid: Grid) -> list[RankArguments | None]:
    """Only rank 0 is called."""
    return [*to_all(arguments, grid)[:1], *[None] * (grid.world_size - 1)]


def by_rows(arguments: Arguments, grid: Grid) -> list[RankArguments | None]:
    """Arguments with rows are cut over the data-parallel ranks, the others go to all.

    Shards are runs of neighbouring rows that differ by one row at most, and may be empty. Raises ShapeError when
    arguments differ in their number of rows.
    """
    cut = {key: a.result.num_rows for key, a in arguments.items() if not a.is_whole and a.result.num_rows is not None}
    if len(set(cut.values())) > 1:
        counts = ", ".join(f"{key!r}: {rows}" for key, rows in cut.items())
        raise ShapeError(
            f"arguments to be cut over the ranks have different numbers of rows ({counts}); one that "
            "every rank shall have as it is goes in whole(...)"
        )
    pieces = {key: shards(arguments[key].result, grid.dp_size) for key in cut}
    shared = {key: argument.result for key, argument in arguments.items() if key not in cut}
    by_dp_rank = [{**shared, **{key: runs[dp] for key, runs in pieces.items()}} for dp in range(grid.dp_size)]
    return [by_dp_rank[grid.dp_rank(rank)] for rank in range(grid.world_size)]


def first(results: Sequence[Result | None], grid: Grid) -> Result:
    """The result of rank 0."""
    return _present(results[:1])[0]


def every_rank(results: Sequence[Result | None], grid: Grid) -> Result:
    """A list of all ranks' results."""
    return Listed(_present(results))


def every_shard(results: Sequence[Result | None], grid: Grid) -> Result:
    """A list of one result a data-parallel rank, from the last pipeline stage."""
    return Listed(_one_a_shard(results, grid, grid.pp_size - 1))


def rows_of_first_stage(results: Sequence[Result | None], grid: Grid) -> Result:
    """The rows of all data-parallel ranks in order, each from the first of its ranks."""
    return Joined(_one_a_shard(results, grid, 0))


def rows_of_last_stage(results: Sequence[Result | None], grid: Grid) -> Result:
    """The rows of all data-parallel ranks in order, each from its last pipeline stage."""
    return Joined(_one_a_shard(results, grid, grid.pp_size - 1))


def _one_a_shard(results: Sequence[Result | None], grid: Grid, stage: int) -> tuple[Result, ...]:
    return _present([results[grid.rank(dp, pp_rank=stage)] for dp in range(grid.dp_size)])


def _present(results: Sequence[Result | None]) -> tuple[Result, ...]:
    return tuple(result for result in results if result is not None)


broadcast = Rule("broadcast", to_all, first)
"""Every rank runs with the same arguments; the result is rank 0's."""
one_rank = Rule("one_rank", to_first, first)
"""Rank 0 alone runs."""
gather = Rule("gather", to_all, every_rank)
"""Every rank runs with the same arguments; the result is the list of all."""
split_rows = Rule("split_rows", by_rows, rows_of_first_stage)
"""Rows are cut over the data-parallel ranks and the results' rows put together in order."""
split_first = Rule("split_first", by_rows, first)
"""Rows are cut as by split_rows; the result, of any type, is rank 0's: all ranks have the same."""
last_stage = Rule("last_stage", by_rows, rows_of_last_stage)
"""As split_rows, with the results of the last pipeline stage."""
split_gather = Rule("split_gather", by_rows, every_shard)
"""Rows are cut as by split_rows; the result is a list of one result a data-parallel rank, of any type."""
