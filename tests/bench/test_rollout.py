"""``verl bench rollout``: the chosen workloads, the comparisons that were asked for, and refusals before any work."""

from __future__ import annotations

import json
import logging

import pytest
from typer.testing import CliRunner

from tests.bench.words import TINY
from verl.bench.rollout import measure_rollout
from verl.cli import app
from verl.common.errors import ConfigError


def test_all_workloads_and_what_they_ran_on() -> None:
    level = logging.getLogger("verl.rollout").level
    found = measure_rollout(TINY, repeats=1)
    assert list(found) == ["setting", "fixed", "spread", "group", "update", "sleep"]
    setting = found["setting"]
    assert (setting["engine"], setting["dtype"], setting["repeats"], setting["temperature"]) == (
        "native",
        "float32",
        1,
        1.0,
    )
    attention = 16 * 16 + 16 + 2 * (16 * 8 + 8) + 16 * 16  # queries; keys and values of 2 of 4 heads; output
    assert setting["parameters"] == 100 * 16 + attention + 3 * 16 * 24 + 3 * 16
    assert found["fixed"]["tokens"] == 12
    assert not {"log_prob_diff", "generate"} & found["fixed"].keys()
    assert logging.getLogger("verl.rollout").level == level


def test_comparisons_are_made_where_there_are_samples() -> None:
    found = measure_rollout(TINY, workloads=["update", "fixed", "fixed"], repeats=1, beside="generate", log_probs=True)
    assert list(found) == ["setting", "update", "fixed"]
    assert found["fixed"]["log_prob_diff"]["tokens"] == 12
    assert 0 < found["fixed"]["log_prob_diff"]["max"] < 1e-5
    assert found["fixed"]["generate"]["ratio"] > 0
    assert not {"log_prob_diff", "generate"} & found["update"].keys()


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"workloads": ["fixd"]}, "unknown workload 'fixd'; did you mean 'fixed'"),
        ({"repeats": 0}, "--repeats must be at least 1, got 0"),
        ({"beside": "generat"}, "did you mean 'generate'"),
        ({"beside": "generate", "workloads": ["sleep", "update"]}, "--beside has nothing .* sleep, update: add one of"),
        ({"log_probs": True, "workloads": ["sleep"]}, "--log-probs has nothing to compare"),
        ({"overrides": ["group.group_size=1"]}, "group.group_size"),
        ({"overrides": ["trainer.device=tpu"]}, "trainer.device"),
        ({"overrides": ["fixed.rows"]}, "no override"),
    ],
)
def test_wrong_words_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        measure_rollout(**{"overrides": [], **changes})  # type: ignore[arg-type]


def test_json_on_the_command_line() -> None:
    words = ["bench", "rollout", "--json", "--repeats", "1", "--workload", "update", "--workload", "fixed", *TINY]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert list(found) == ["setting", "update", "fixed"]


def test_lines_on_the_command_line() -> None:
    result = CliRunner().invoke(app, ["bench", "rollout", "--repeats", "1", "--workload", "fixed", *TINY])
    assert result.exit_code == 0, result.output
    assert "fixed/tokens_per_s_min " in result.stdout
