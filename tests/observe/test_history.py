from __future__ import annotations

import json
import math
from pathlib import Path

import numpy
import pytest
import torch

from verl.common.errors import ConfigError, DataError
from verl.observe.history import JsonlTracker, column, load_metrics


def written(path: Path, steps: int) -> Path:
    tracker = JsonlTracker(path)
    for step in range(1, steps + 1):
        tracker.log(step, {"reward/score/mean": step / 10})
    tracker.close()
    return path


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_every_line_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {"a": 0.5, "tokens/sum": 7, "b": torch.tensor(2.0), "c": numpy.float32(0.25)})  # type: ignore[dict-item]
    assert path.read_text() == '{"step": 1, "a": 0.5, "tokens/sum": 7, "b": 2.0, "c": 0.25}\n'
    tracker.close()


def test_non_finite_numbers_are_strict_json_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonlTracker(path).log(1, {"a": math.nan, "b": math.inf, "c": -math.inf})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} isn't JSON")

    assert json.loads(path.read_text(), parse_constant=refuse) == {
        "step": 1,
        "a": "NaN",
        "b": "Infinity",
        "c": "-Infinity",
    }
    (row,) = load_metrics(path)
    assert math.isnan(row["a"]) and row["b"] == math.inf and row["c"] == -math.inf


def test_resume_drops_later_steps(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", 5)
    tracker = JsonlTracker(path, resumed_step=3)
    assert steps_in(path) == [1, 2, 3]
    tracker.log(4, {"x": 1.0})
    tracker.log(5, {"x": 1.0})
    assert steps_in(path) == [1, 2, 3, 4, 5]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_kill_at_any_byte_of_the_last_line(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path / "metrics.jsonl", 3)
    path.write_bytes(path.read_bytes()[:-cut])
    assert [row["step"] for row in load_metrics(path)] in ([1, 2], [1, 2, 3])
    tracker = JsonlTracker(path, resumed_step=2)
    tracker.log(3, {"reward/score/mean": 0.3})
    assert [(row["step"], row["reward/score/mean"]) for row in load_metrics(path)] == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_whole_last_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", 2)
    path.write_bytes(path.read_bytes()[:-1])
    JsonlTracker(path, resumed_step=2).log(3, {})
    assert steps_in(path) == [1, 2, 3]


def test_resume_from_before_the_first_step_starts_over(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", 2)
    JsonlTracker(path, resumed_step=0).log(1, {"x": 1})
    assert path.read_text() == '{"step": 1, "x": 1}\n'


def test_fresh_run_refuses_another_runs_file(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", 2)
    with pytest.raises(ConfigError, match=r"already holds steps 1 to 2"):
        JsonlTracker(path)
    assert steps_in(path) == [1, 2]


def test_a_step_logged_twice_has_one_line(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", 2)
    tracker = JsonlTracker(path, resumed_step=2)
    tracker.log(2, {"validation/score/mean": 0.9})
    tracker.log(3, {"x": 1.0})
    tracker.log(3, {"y": 2.0, "x": 3.0})
    tracker.log(4, {})
    assert load_metrics(path)[1:] == [
        {"step": 2, "reward/score/mean": 0.2, "validation/score/mean": 0.9},
        {"step": 3, "x": 3.0, "y": 2.0},
        {"step": 4},
    ]
    with pytest.raises(ValueError, match="step 1 comes after step 4"):
        tracker.log(1, {})


def test_a_failed_write_leaves_whole_lines(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    import signal

    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {"a": 1.0})
    old, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, old[1]))  # room for five bytes more
    try:
        with pytest.raises(OSError):
            tracker.log(2, {"a": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    tracker.log(3, {"a": 3.0})
    assert steps_in(path) == [1, 3]


def test_broken_line_in_the_middle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\0\0\0\n{"step": 2}\n')
    with pytest.raises(DataError, match="line 2"):
        load_metrics(path)
    JsonlTracker(path, resumed_step=2)
    assert steps_in(path) == [1, 2] and "line 2 is broken" in caplog.text


def test_load_takes_a_run_folder_and_names_what_is_missing(tmp_path: Path) -> None:
    written(tmp_path / "metrics.jsonl", 2)
    rows = load_metrics(tmp_path)
    assert column(rows, "reward/score/mean") == ([1, 2], [0.1, 0.2])
    with pytest.raises(DataError, match="did you mean 'reward/score/mean'"):
        column(rows, "reward/score/men")
    with pytest.raises(DataError, match="no metrics at"):
        load_metrics(tmp_path / "absent")
