"""A group passes calls on with their rule, and names what it doesn't offer."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from verl.controller.dispatch import Rule, gather, split_rows
from verl.controller.group import WorkerGroup
from verl.controller.handle import Handle
from verl.controller.place import Grid


def test_calls() -> None:
    calls = []

    def submit(method: str, rule: Rule, arguments: dict[str | int, Any]) -> Handle:
        calls.append((method, rule, arguments))
        return Handle(method, Future())

    group = WorkerGroup("scorer", {"score": split_rows, "report": gather}, Grid(2), submit)
    assert isinstance(group.score([1], 2, scale=3), Handle)
    assert calls == [("score", split_rows, {0: [1], 1: 2, "scale": 3})]
    assert repr(group) == "<WorkerGroup scorer: 2 workers, report, score>"
    with pytest.raises(AttributeError, match=r"'scorer' offers no method 'scor'; did you mean 'score'.*report"):
        group.scor()
