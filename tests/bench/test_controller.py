"""The controller's measure on the command line: a row a cell, and what it ran on."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from verl.bench.controller import controller_lines, measure_controller
from verl.cli import app
from verl.common.errors import ConfigError
from verl.controller.measure import SIZES


def test_json_on_the_command_line() -> None:
    result = CliRunner().invoke(app, ["bench", "controller", "--json", "--calls", "1", "--max-ranks", "2"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    cells = [(row["num_ranks"], row["payload_bytes"]) for row in found["calls"]]
    assert cells == [*((2, size) for size in SIZES), (1, 1024)]
    assert all(0 < row["submit_s"] < row["total_s"] for row in found["calls"])
    assert (found["setting"]["executor"], found["setting"]["calls"]) == ("processes", 1)


def test_one_line_a_cell_in_milliseconds() -> None:
    row = {"num_ranks": 2, "payload_bytes": 4096, "submit_s": 0.00012, "busy_s": 0.002, "total_s": 0.01}
    *setting, head, line = controller_lines({"setting": {"cpus": 2}, "calls": [row]})
    assert [words.split() for words in setting] == [["cpus", "2"]]
    assert line.split() == ["2", "4,096", "0.120", "2.000", "10.000"] and len(head) == len(line)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"executor": "proceses"}, "proceses.*did you mean 'processes'"),
        ({"executor": "inprocess"}, "which starts its workers"),
        ({"num_calls": 0}, "--calls must be at least 1, got 0"),
        ({"max_ranks": 1}, "--max-ranks must be at least 2, got 1"),
    ],
)
def test_wrong_words_are_refused(words: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        measure_controller(**words)  # type: ignore[arg-type]
