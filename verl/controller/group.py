"""A worker group: one role on all ranks of a pool, whose marked methods are called as if it were one object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from verl.controller.dispatch import Rule, rule_named
from verl.controller.handle import Handle
from verl.controller.place import Grid

Submit = Callable[[str, Rule, dict[str | int, Any]], Handle]


class WorkerGroup:
    """Made by ``Controller.group``. ``group.method(...)`` returns a handle at once.

    name  of the role
    grid  its ranks along the data-parallel, tensor-parallel and pipeline axis
    """

    def __init__(self, name: str, rules: Mapping[str, Rule], grid: Grid, submit: Submit) -> None:
        self.name, self.grid = name, grid
        self._rules, self._submit = rules, submit

    def __repr__(self) -> str:
        return f"<WorkerGroup {self.name}: {self.grid.world_size} workers, {', '.join(sorted(self._rules))}>"

    def __getattr__(self, method: str) -> Callable[..., Handle]:
        """A method of the role. Raises AttributeError naming the nearest one that is offered."""
        rule = rule_named(vars(self).get("_rules", {}), vars(self).get("name", ""), method)

        def call(*args: Any, **kwargs: Any) -> Handle:
            arguments: dict[str | int, Any] = dict(enumerate(args))
            arguments.update(kwargs)
            return self._submit(method, rule, arguments)

        return call
