"""A synthetic step is the real loop on exactly the work that it says."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl.bench.step import measure_step, step_lines
from verl.cli import app
from verl.common.errors import ConfigError

TINY = [
    "model.scratch.hidden_size=16",
    "model.scratch.intermediate_size=24",
    "model.scratch.num_hidden_layers=1",
    "model.scratch.vocab_size=100",
    "data.max_prompt_tokens=5",
    "rollout.max_response_tokens=3",
    "trainer.prompts_per_step=2",
    "trainer.group_size=3",
    "trainer.device=cpu",
]


def test_figures_are_of_exactly_the_work_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = measure_step(TINY, 1)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    rows, prompt, response = 2 * 3, 5, 3
    assert found["perf/tokens"] == rows * (prompt + response)
    assert found["perf/tokens_per_s"] == pytest.approx(48 / found["timing/step_s"])
    assert found["perf/rollout_tokens_per_s"] == pytest.approx(18 / found["timing/generate_s"])
    assert found["perf/train_tokens_per_s"] == pytest.approx(48 / found["timing/update_actor_s"])
    assert 0 < found["actor/rollout_log_prob_diff/max"] < 1e-5
    phases = sum(value for key, value in found.items() if key.startswith("timing/") and key != "timing/step_s")
    assert 0 < phases <= found["timing/step_s"]
    setting = found["setting"]
    assert (setting["prompts_per_step"], setting["group_size"], setting["steps"]) == (2, 3, 1)
    assert (setting["prompt_tokens"], setting["response_tokens"]) == (5, 3)
    attention = 16 * 16 + 16 + 2 * (16 * 8 + 8) + 16 * 16  # queries; keys and values of 2 of 4 heads; output
    assert setting["parameters"] == 100 * 16 + attention + 3 * 16 * 24 + 3 * 16


def test_a_trace_stays_where_the_words_say(tmp_path: Path) -> None:
    measure_step([*TINY, "profile.steps=[2]", f"trainer.output_dir={tmp_path}"], 1)
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["step_000002.rank0.json"]


def test_a_step_of_two_workers() -> None:
    found = measure_step([*TINY, "placement.devices=2"], 1)
    assert found["perf/tokens"] == 48
    assert (found["setting"]["executor"], found["setting"]["actor_devices"]) == ("processes", 2)


@pytest.mark.parametrize(
    "words, steps, said",
    [
        (TINY, 0, "--steps"),
        ([*TINY, "actor.optim.leraning_rate=1"], 1, "leraning_rate"),
        ([*TINY, "trainer.prompts_per_step=0"], 1, "prompts_per_step"),
        ([*TINY, "profile.steps=[2]"], 1, r"trainer\.output_dir"),
    ],
)
def test_wrong_words_are_refused(words: list[str], steps: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        measure_step(words, steps)


def test_one_line_a_figure() -> None:
    lines = step_lines({"timing/step_s": 0.123456, "perf/tokens": 12345.0, "setting": {"device": "cpu"}})
    assert [line.split() for line in lines] == [
        ["device", "cpu"],
        ["timing/step_s", "0.1235"],
        ["perf/tokens", "12,345"],
    ]


def test_json_on_the_command_line() -> None:
    result = CliRunner().invoke(app, ["bench", "step", "--json", "--steps", "1", *TINY])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["setting"]["steps"] == 1
