from __future__ import annotations

from pathlib import Path

import pytest

from verl.common.errors import DataError
from verl.observe.comparison import comparison, load_runs, panel_keys, print_comparison
from verl.observe.history import JsonlTracker, Runs

SCORE, VALIDATION = "reward/score/mean", "validation/score/mean"


def folder(path: Path, *metrics: dict[str, float]) -> Path:
    """A run with these metrics at its steps 0, 1, .."""
    tracker = JsonlTracker(path / "metrics.jsonl")
    for step, numbers in enumerate(metrics):
        tracker.log(step, numbers)
    return path


def test_the_table() -> None:
    steps = [{"step": step, SCORE: step / 100, "timing/step_s": 2.0 if step % 2 else 3.0} for step in range(1, 31)]
    validated: Runs = {"grpo": [{"step": 0, VALIDATION: 0.25}, *steps, {"step": 31, VALIDATION: 0.25}]}
    short: Runs = {"a longer name": [{"step": 1, SCORE: 0.5}, {"step": 2, SCORE: float("nan")}]}
    assert comparison({**validated, **short}).splitlines() == [
        "run            steps  reward, first  reward, last  best validation  at step  s a step",
        "grpo              31         0.0550        0.2550           0.2500        0      2.50",
        "a longer name      2         0.5000        0.5000                -        -         -",
        "first, last: the mean of 10 steps with a value, of a run with fewer that of all",
    ]
    head, *lines = comparison(validated).splitlines()
    assert "reward, first 10  reward, last 10" in head and len(lines) == 1


def test_headings_count_the_steps_that_every_run_has() -> None:
    runs: Runs = {name: [{"step": step, SCORE: 0.5} for step in range(1, 7)] for name in "ab"}
    head, *lines = comparison(runs).splitlines()
    assert "reward, first 6  reward, last 6" in head and len(lines) == 2


def test_what_is_no_number_is_told_from_what_is_not_there() -> None:
    broken = {SCORE: float("nan"), VALIDATION: float("nan"), "timing/step_s": float("inf")}
    runs: Runs = {"good": [{"step": 1, SCORE: 0.5}], "broken": [{"step": 1, **broken}], "none": [{"step": 1}]}
    assert [line.split() for line in comparison(runs).splitlines()[1:]] == [
        ["good", "1", "0.5000", "0.5000", "-", "-", "-"],
        ["broken", "1", "nan", "nan", "nan", "-", "nan"],
        ["none", "1", "-", "-", "-", "-", "-"],
    ]


def test_runs_of_several_kinds_have_the_columns_of_each() -> None:
    runs: Runs = {
        "sft": [{"step": 1, "actor/loss": 2.0}],
        "grpo": [{"step": 1, SCORE: 0.5}],
        "begun": [{"step": 0, VALIDATION: 0.125}],
    }
    head, *lines = comparison(runs).splitlines()
    assert "  steps  reward, first 1  reward, last 1  loss, first 1  loss, last 1  best" in head
    assert [line.split() for line in lines] == [
        ["sft", "1", "-", "-", "2.0000", "2.0000", "-", "-", "-"],
        ["grpo", "1", "0.5000", "0.5000", "-", "-", "-", "-", "-"],
        ["begun", "0", "-", "-", "-", "-", "0.1250", "0", "-"],
    ]
    assert panel_keys(runs) == [VALIDATION, SCORE, "actor/loss"]


def test_panels_are_of_what_the_runs_have() -> None:
    plain: Runs = {"a": [{"step": 1, SCORE: 0.5}], "b": [{"step": 1, SCORE: 0.5}]}
    alone: Runs = {"a": [{"step": 1, SCORE: 0.5, VALIDATION: 0.5}]}
    assert panel_keys(plain) == panel_keys(alone) == [SCORE]
    assert panel_keys({"a": [{"step": 0, "actor/kl": 0.0}]}) == []


def test_a_name_is_as_long_as_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("one/lr/grpo", "two/lr/grpo", "two/ppo", "three/sft"):
        folder(tmp_path / place, {SCORE: len(place)})
    monkeypatch.chdir(tmp_path / "three" / "sft")
    words = ["../../two/ppo", "../../one/lr/grpo", ".", "../../two/lr/grpo/", "../../two/ppo"]
    runs = load_runs([Path(word) for word in words])
    assert list(runs) == ["ppo", "one/lr/grpo", "sft", "two/lr/grpo"]
    assert [rows[0][SCORE] for rows in runs.values()] == [7, 11, 9, 11]


def test_a_folder_without_steps_is_named(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", {SCORE: 0.5})
    begun = folder(tmp_path / "begun")
    (begun / "metrics.jsonl").touch()
    for broken, message in ((tmp_path / "absent", "no metrics at"), (begun, "no finished step")):
        with pytest.raises(DataError, match=message) as error:
            load_runs([run, broken])
        assert str(broken) in str(error.value)


def test_a_line_is_never_cut(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    runs: Runs = {"[red]" + "x" * 60: [{"step": 1, SCORE: 0.5}], "b": [{"step": 1}]}
    print_comparison(runs)
    assert capsys.readouterr().out == comparison(runs)
