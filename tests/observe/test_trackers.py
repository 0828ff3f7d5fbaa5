from __future__ import annotations

import builtins
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from verl.common.errors import MissingExtra
from verl.observe import trackers
from verl.observe.history import load_metrics
from verl.observe.trackers import TRACKERS, TrackConfig, TrackedRun, Trackers, open_trackers

STEP = {"reward/score/mean": 0.5, "actor/kl": 0.001}


def run_at(folder: Path, resumed_step: int | None = None, **track: Any) -> TrackedRun:
    return TrackedRun(folder=folder, total_steps=5, track=TrackConfig(**track), resumed_step=resumed_step)


class Recorder:
    """A tracker that fails at the steps it is told to."""

    def __init__(self, failing: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.failing, self.steps, self.is_closed = failing, [], False  # type: ignore[var-annotated]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step in self.failing:
            raise OSError(28, "No space left on device")
        self.steps.append(step)

    def close(self) -> None:
        self.is_closed = True
        if self.failing:
            raise ConnectionError("gone")


def test_jsonl_alone_makes_only_its_file_and_ignores_the_interval(tmp_path: Path) -> None:
    with open_trackers(run_at(tmp_path / "run", trackers=[], log_interval=3)) as told:
        for step in range(1, 6):
            told.log(step, STEP)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]
    assert [row["step"] for row in load_metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_interval_lets_the_last_step_and_validations_through(tmp_path: Path) -> None:
    run = run_at(tmp_path, log_interval=2)
    assert [step for step in range(1, 6) if run.is_due(step)] == [2, 4, 5]
    both = {**STEP, "validation/score/mean": 0.7}
    assert run.due_part(3, both) == {"validation/score/mean": 0.7}
    assert run.due_part(3, STEP) == {}
    assert run.due_part(4, both) == both


def test_a_failing_tracker_is_named_once_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Recorder({2, 3}), Recorder()
    told = Trackers({"bad": bad, "good": good})
    with caplog.at_level(logging.WARNING):
        for step in range(1, 5):
            told.log(step, STEP)
        assert len(caplog.records) == 1 and "'bad' failed at step 2" in caplog.text and "No space" in caplog.text
        told.close()
    assert good.steps == [1, 2, 3, 4] and bad.steps == [1, 4]
    assert bad.is_closed and good.is_closed
    assert "'bad' failed to close" in caplog.text and "'bad' missed 2 steps" in caplog.text


def test_unknown_and_needless_names() -> None:
    with pytest.raises(ValueError, match="did you mean 'tensorboard'"):
        TrackConfig(trackers=["tensorbord"])
    with pytest.raises(ValueError, match="always written"):
        TrackConfig(trackers=["jsonl"])
    with pytest.raises(ValueError):
        TrackConfig(log_interval=0)
    assert TrackConfig(trackers=["console", "console"]).trackers == ["console"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_names_its_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(module: str, *args: Any, **kwargs: Any) -> Any:
        if module.startswith((name, "torch.utils.tensorboard")):
            raise ImportError(module)
        return real(module, *args, **kwargs)

    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"verl\[track\]"):
        TRACKERS.load(name)(run_at(tmp_path))
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    with pytest.raises(MissingExtra, match=r"verl\[track\]"):
        open_trackers(run_at(tmp_path, trackers=[name]))
    assert list(tmp_path.iterdir()) == []


def test_a_service_that_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreachable(run: TrackedRun) -> Recorder:
        raise ConnectionError("no route")

    monkeypatch.setattr(TRACKERS, "load", lambda name: unreachable)
    with pytest.raises(ConnectionError):
        open_trackers(run_at(tmp_path / "fresh", trackers=["console"]))
    with open_trackers(run_at(tmp_path / "resumed", 0, trackers=["console"])) as told:
        told.log(1, STEP)
    assert "'console' can't be opened" in caplog.text
    assert len(load_metrics(tmp_path / "resumed")) == 1


def scalars(folder: Path, key: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, round(event.value, 4)) for event in events.Scalars(key)]


def test_tensorboard_holds_due_steps_and_resumes_without_doubles(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with open_trackers(run_at(tmp_path, trackers=["tensorboard"], log_interval=2)) as told:
        for step in range(1, 5):
            told.log(step, {"reward/score/mean": step / 10})
    with open_trackers(run_at(tmp_path, 3, trackers=["tensorboard"], log_interval=2)) as told:
        for step in (4, 5):
            told.log(step, {"reward/score/mean": step / 5})
    assert scalars(tmp_path / "tensorboard", "reward/score/mean") == [(2, 0.2), (4, 0.8), (5, 1.0)]


def test_wandb_offline_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for resumed in (None, 1):
        run = run_at(tmp_path, resumed, trackers=["wandb"])
        with open_trackers(run) as told:
            told.log(1 if resumed is None else 2, STEP)
        ids = (tmp_path / "wandb_id.txt").read_text().strip()
        assert len(list((tmp_path / "wandb").glob(f"*/run-{ids}.wandb"))) >= 1
    assert len({path.name for path in (tmp_path / "wandb").glob("*/run-*.wandb")}) == 1
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])["step"] == 2
