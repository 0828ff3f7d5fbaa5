from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.processes import files_of_at_most
from tests.trainer.runs import checkpoints_of, metrics_of, rollouts_of, sections
from verl.common.errors import CheckpointError
from verl.trainer.callbacks import SaveCheckpoints, write_rows
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.sections import OnPolicyRun


def trainer_of(folder: Path, callbacks: list[Any] | None = None, **changes: Any) -> PPOTrainer:
    folder.mkdir(exist_ok=True)
    return PPOTrainer.from_config(OnPolicyRun.parse(sections(folder, **changes)), callbacks)


def run(folder: Path, steps: int | None = None, **changes: Any) -> Path:
    trainer = trainer_of(folder, **changes)
    trainer.run(steps)
    trainer.close()
    return folder / "run"


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"trainer__save_every": 2, "trainer__keep_checkpoints": None}, [2, 4, 5]),
        ({"trainer__save_every": 1}, [4, 5]),
        ({"trainer__save_every": 1, "trainer__keep_checkpoints": 1}, [5]),
        ({"trainer__save_every": 9}, [5]),
        ({}, [5]),
    ],
)
def test_checkpoints_on_schedule_and_at_the_end(tmp_path: Path, changes: dict[str, Any], steps: list[int]) -> None:
    folder = run(tmp_path, trainer__total_steps=5, **changes)
    assert checkpoints_of(folder) == [f"step_{step:06d}" for step in steps]


def test_a_step_that_is_saved_is_not_saved_again(tmp_path: Path) -> None:
    folder = run(tmp_path, trainer__total_steps=2, trainer__save_every=2)
    made = (folder / "checkpoints" / "step_000002").stat().st_mtime_ns
    run(tmp_path, trainer__total_steps=2, trainer__save_every=2)
    assert (folder / "checkpoints" / "step_000002").stat().st_mtime_ns == made


@pytest.mark.parametrize(("every", "steps"), [(1, [1, 2, 3, 4]), (3, [3]), (None, [])])
def test_samples_on_schedule(tmp_path: Path, every: int | None, steps: list[int]) -> None:
    folder = run(tmp_path, trainer__total_steps=4, trainer__save_rollouts_every=every)
    assert list(rollouts_of(folder)) == [f"step_{step:06d}.jsonl" for step in steps]


def test_a_sample_says_where_it_came_from(tmp_path: Path) -> None:
    for step, rows in enumerate(rollouts_of(run(tmp_path)).values(), start=1):
        assert len(rows) == 8
        for row in rows:
            assert {"step", "row_id", "prompt", "response", "response_ids", "ground_truth", "score"} <= set(row)
            assert row["step"] == step and row["policy_version"] == step - 1
            assert len(row["log_probs"]) == len(row["response_ids"])


def test_samples_of_steps_that_the_run_went_back_over_are_dropped(tmp_path: Path) -> None:
    """A run of 5 steps whose newest checkpoint is of step 3, and which then ends at 4."""
    folder = run(tmp_path, 3, trainer__total_steps=5)
    trainer = trainer_of(tmp_path, trainer__total_steps=5)
    trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, SaveCheckpoints)]
    trainer.run()
    assert len(rollouts_of(folder)) == len(metrics_of(folder)) == 5
    run(tmp_path, trainer__total_steps=4)
    assert list(rollouts_of(folder)) == [f"step_{step:06d}.jsonl" for step in (1, 2, 3, 4)]
    assert [line["step"] for line in metrics_of(folder)] == [1, 2, 3, 4]


def test_the_effective_config_is_saved(tmp_path: Path) -> None:
    folder = run(tmp_path)
    from verl.config import load_config

    assert load_config(folder / "config.yaml") == OnPolicyRun.parse(sections(tmp_path))


def test_a_config_that_cannot_be_written(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    (tmp_path / "run" / "config.yaml").mkdir()
    with pytest.raises(CheckpointError, match=r"config can't be written to .*config\.yaml"):
        trainer.run()
    trainer.close()


def test_samples_that_cannot_be_written_cost_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of(tmp_path)
    (tmp_path / "run" / "rollouts").write_text("a file")
    assert trainer.run().steps == 2
    trainer.close()
    assert "samples were not written" in caplog.text


def test_samples_that_do_not_fit_leave_no_half_of_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with files_of_at_most(100):
        write_rows(tmp_path / "rows.jsonl", [{"text": "x" * 50_000}])
    assert "samples were not written" in caplog.text and not list(tmp_path.iterdir())


def test_rows_are_json_whatever_they_hold(tmp_path: Path) -> None:
    write_rows(tmp_path / "deep" / "rows.jsonl", [{"é": Path("x"), "n": [1, None]}, {}])
    lines = (tmp_path / "deep" / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [{"é": "x", "n": [1, None]}, {}]


def test_rows_that_json_or_utf8_cant_hold_are_written_too(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    rows: list[dict[str, object]] = [
        {"ground_truth": "half \ud83d, é", "score": 1.0},
        {"ground_truth": {(0, 1): "wall"}, "score": 0.5},
        {"ground_truth": endless, "score": 0.0},
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    lines = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        rows[0],
        {"ground_truth": "{(0, 1): 'wall'}", "score": 0.5},
        {"ground_truth": "[[...]]", "score": 0.0},
    ]


class Notes:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_start(self, trainer: PPOTrainer) -> None:
        self.seen.append("start")

    def on_step(self, trainer: PPOTrainer, batch: Any, metrics: dict[str, float]) -> None:
        metrics["mine/number"] = float(len(batch))
        self.seen.append(f"step {trainer.steps_done}")

    def on_end(self, trainer: PPOTrainer) -> None:
        self.seen.append("end")


def test_a_callback_of_ones_own(tmp_path: Path) -> None:
    notes = Notes()
    trainer = trainer_of(tmp_path, [notes])
    assert trainer.run().metrics["mine/number"] == 8
    trainer.step()
    trainer.close()
    assert notes.seen == ["start", "step 1", "step 2", "end", "start", "step 3", "end"]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_metrics_of_a_callback_before_the_trackers_are_logged(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.callbacks.insert(0, Notes())
    trainer.run()
    trainer.close()
    assert [line["mine/number"] for line in metrics_of(tmp_path / "run")] == [8, 8]


def test_all_callbacks_end_when_a_step_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of(tmp_path, trainer__total_steps=3)
    notes = Notes()
    trainer.callbacks.append(notes)
    trainer.run(num_steps=1)
    trainer.parts.rewards.score = lambda items: 1 / 0  # type: ignore[method-assign]
    with caplog.at_level(logging.INFO), pytest.raises(ZeroDivisionError):
        trainer.run(num_steps=1)
    trainer.close()
    assert notes.seen == ["start", "step 1", "end", "start", "end"]
    assert checkpoints_of(tmp_path / "run") == ["step_000001"]
