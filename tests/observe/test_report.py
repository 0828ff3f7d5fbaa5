from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from verl.common.errors import DataError
from verl.observe.history import JsonlTracker
from verl.observe.report import print_report, sample_responses, summarise


def finished_run(folder: Path) -> Path:
    tracker = JsonlTracker(folder / "metrics.jsonl")
    tracker.log(0, {"validation/score/mean": 0.125})
    for step in range(1, 31):
        metrics = {"reward/score/mean": step / 100, "timing/step_s": 2.0, "perf/tokens_per_s": 1000.0 + step}
        if step % 10 == 0:
            metrics["validation/score/mean"] = 0.9 if step == 20 else 0.5
        tracker.log(step, metrics)
    return folder


def write_rollouts(folder: Path, step: int, scores: list[float | None]) -> None:
    path = folder / "rollouts" / f"step_{step:06d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    rows = [
        {"step": step, "row_id": i, "prompt": f"[INST] what is {i}? [/INST]", "response": f"[red]it is {score}",
         "score": score, "ground_truth": str(i), "finish_reason": "stop"}
        for i, score in enumerate(scores)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_numbers(tmp_path: Path) -> None:
    text = summarise(finished_run(tmp_path)).plain
    found = {line[:28].strip(): line[28:] for line in text.splitlines() if len(line) > 28}
    assert found["steps"] == "30"
    assert found["mean reward, first 10"] == "0.0550" and found["mean reward, last 10"] == "0.2550"
    assert found["time"] == "1m00s  (2.00 s a step)" and found["tokens/s"] == "1,016"
    assert found["best validation/score/mean"] == "0.9000  (step 20)"
    assert "0.3 ┤" in text and "response of step" not in text


def test_three_samples_of_the_last_step(tmp_path: Path) -> None:
    finished_run(tmp_path)
    write_rollouts(tmp_path, 9, [1.0])
    write_rollouts(tmp_path, 20, [0.5, None, 1.0, 0.0, math.nan])
    picks = [(name, row["score"]) for name, row in sample_responses(tmp_path)]
    assert picks == [("worst", 0.0), ("middle", 0.5), ("best", 1.0)]
    text = summarise(tmp_path).plain
    assert "--- best response of step 20: score 1, ended by stop" in text
    assert "[INST] what is 2? [/INST]" in text and "[red]it is 1.0" in text and "ground truth: 2" in text


def test_fewer_than_three_samples(tmp_path: Path) -> None:
    finished_run(tmp_path)
    write_rollouts(tmp_path, 1, [0.25])
    assert [name for name, _ in sample_responses(tmp_path)] == ["best"]
    write_rollouts(tmp_path, 2, [None])  # nothing scored there: the step before it
    assert [row["step"] for _, row in sample_responses(tmp_path)] == [1]
    write_rollouts(tmp_path, 3, [1.0, 0.0])
    assert [(name, row["score"]) for name, row in sample_responses(tmp_path)] == [("worst", 0.0), ("best", 1.0)]


def test_a_run_that_is_being_written(tmp_path: Path) -> None:
    finished_run(tmp_path)
    write_rollouts(tmp_path, 2, [0.5])
    for path in (tmp_path / "metrics.jsonl", tmp_path / "rollouts" / "step_000002.jsonl"):
        path.write_text(path.read_text() + '{"step": 31, "sco')
    assert "steps                       30" in summarise(tmp_path).plain
    assert len(sample_responses(tmp_path)) == 1


def test_other_runs_than_of_rewards(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(1, {"actor/loss": 0.5, "reward/score/mean": math.nan})
    assert "steps                       1" in summarise(tmp_path).plain


def test_long_responses_keep_their_end_and_control_codes_do_not_reach_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished_run(tmp_path)
    write_rollouts(tmp_path, 1, [1.0])
    path = tmp_path / "rollouts" / "step_000001.jsonl"
    row = json.loads(path.read_text()) | {"response": "begin \x1b[2J" + "x" * 5000 + " the answer is 7"}
    path.write_text(json.dumps(row) + "\n")
    print_report(tmp_path)
    shown = capsys.readouterr().out
    assert "begin ?[2J" in shown and "the answer is 7" in shown and "characters" in shown and "\x1b" not in shown


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no metrics at"):
        summarise(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(DataError, match="no finished step"):
        summarise(tmp_path)


def test_reporting_loads_no_torch() -> None:
    program = "import sys, verl.observe.report; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
