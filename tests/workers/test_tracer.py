import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.common.errors import WorkerError
from verl.controller import Controller, Place, ResourcePool, WorkerGroup, broadcast, dispatch
from verl.observe.profiler import ProfileConfig
from verl.workers.tracer import RemoteProfiler, Tracer


class Multiplies:
    def __init__(self, place: Place) -> None:
        self.ones = torch.ones(4, 4)

    @dispatch(broadcast)
    def work(self, fails: bool = False) -> None:
        torch.linalg.multi_dot([self.ones, self.ones, self.ones])
        if fails:
            raise ValueError("no such thing")


@pytest.fixture
def controller() -> Iterator[Controller]:
    with Controller("inprocess") as controller:
        yield controller


def groups(controller: Controller, folder: Path, first_rank: int, **keys: Any) -> tuple[WorkerGroup, WorkerGroup]:
    pool = ResourcePool(kind="cpu")
    tracer = controller.group(
        "tracer", Tracer, pool, config=ProfileConfig(**keys), folder=folder, first_rank=first_rank
    )
    return controller.group("role", Multiplies, pool), tracer


def names_in(trace: Path) -> set[str]:
    return {event.get("name") for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]}


def test_selected_steps_are_traced_where_the_work_is(controller: Controller, tmp_path: Path) -> None:
    role, tracer = groups(controller, tmp_path, 3, steps=[2])
    profiler = RemoteProfiler([tracer], ProfileConfig(steps=[2]), total_steps=3)
    for number in (1, 2, 3):
        with profiler.step(number):
            role.work().get()
    (trace,) = tmp_path.iterdir()
    assert trace.name == "step_000002.rank3.json"
    assert {"step 2", "aten::linalg_multi_dot"} <= names_in(trace)


def test_a_rank_that_is_not_selected_writes_nothing(controller: Controller, tmp_path: Path) -> None:
    role, tracer = groups(controller, tmp_path, 0, steps=[1], ranks=[1])
    with RemoteProfiler([tracer], ProfileConfig(steps=[1]), total_steps=1).step(1):
        role.work().get()
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_raises_leaves_its_trace_and_its_error(controller: Controller, tmp_path: Path) -> None:
    role, tracer = groups(controller, tmp_path, 0, steps=[1])
    profiler = RemoteProfiler([tracer], ProfileConfig(steps=[1]), total_steps=1)
    with pytest.raises(WorkerError, match="no such thing"), profiler.step(1):
        role.work(fails=True).get()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001.rank0.json"]


def test_a_selection_that_matches_nothing_is_said_once(
    controller: Controller, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys: dict[str, Any] = {"steps": [1, 9], "ranks": [0, 1]}
    with caplog.at_level(logging.WARNING):
        _, tracer = groups(controller, tmp_path, 0, **keys)
        RemoteProfiler([tracer], ProfileConfig(**keys), total_steps=2)
    first, second = (record.getMessage() for record in caplog.records)
    assert "profile.steps [9] match no step" in first and "profile.ranks [1] match no rank" in second
