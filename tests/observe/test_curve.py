from __future__ import annotations

import builtins
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.processes import files_of_at_most
from verl.common.errors import ConfigError, DataError, MissingExtra
from verl.observe.curve import reward_curve_png, reward_curve_text, running_mean
from verl.observe.history import JsonlTracker


def dots(chart: str) -> list[list[bool]]:
    """The dots of a chart, row by row, from its Braille characters."""
    rows = [line.partition("┤")[2] for line in chart.splitlines() if "┤" in line]
    width = max(len(row) for row in rows)
    grid = [[False] * (2 * width) for _ in range(4 * len(rows))]
    order = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (3, 1)]
    for y, row in enumerate(rows):
        for x, char in enumerate(row):
            for bit, (down, right) in enumerate(order):
                if char != " " and (ord(char) - 0x2800) >> bit & 1:
                    grid[4 * y + down][2 * x + right] = True
    return grid


def test_a_rising_line_rises_from_corner_to_corner() -> None:
    chart = reward_curve_text([0.0, 1.0], width=20, height=4)
    grid = dots(chart)
    assert grid[15][0] and grid[0][-1] and not grid[0][0]
    heights = [min(y for y in range(16) if grid[y][x]) for x in range(len(grid[0]))]
    assert heights == sorted(heights, reverse=True)


def test_labels_are_the_range_and_the_steps() -> None:
    lines = reward_curve_text([0.25, 0.5, 0.125], width=40, height=5, steps=[10, 20, 30]).splitlines()
    assert len(lines) == 7 and lines[0].startswith("  0.5 ┤") and lines[4].startswith("0.125 ┤")
    assert lines[5].startswith("      └───") and lines[6].split() == ["step", "10", "30"]
    assert max(len(line) for line in lines) <= 40


@pytest.mark.parametrize("count", [1, 2, 3, 1000])
@pytest.mark.parametrize("height", [1, 12])
def test_any_number_of_values_fits(count: int, height: int) -> None:
    chart = reward_curve_text([math.sin(i / 9) for i in range(count)], width=60, height=height)
    assert len(chart.splitlines()) == height + 2 and max(len(line) for line in chart.splitlines()) <= 60
    assert any(any(row) for row in dots(chart))


def test_what_cannot_be_drawn() -> None:
    assert reward_curve_text([]) == reward_curve_text([math.nan, math.inf]) == "(no values to draw)"
    flat = reward_curve_text([0.5, 0.5, 0.5], width=30, height=3)
    assert flat.splitlines()[0].startswith("0.5 ┤⠉") and "0.5" not in flat.splitlines()[2]
    assert reward_curve_text([1.0, math.nan, 3.0]) == reward_curve_text([1.0, 3.0], steps=[1, 3])


def test_running_mean() -> None:
    assert running_mean([1.0, 3.0, math.nan, 5.0], 2) == [1.0, 2.0, 3.0, 5.0]
    assert math.isnan(running_mean([math.nan], 2)[0])


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    for step in range(1, 41):
        tracker.log(step, {"reward/score/mean": math.nan if step == 5 else step / 40, "actor/kl": 0.1})
    return tmp_path / "metrics.jsonl"


def test_png(metrics: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one = reward_curve_png(metrics, tmp_path / "plots" / "reward.png")
    two = reward_curve_png(tmp_path, tmp_path / "both.png", ["reward/score/mean", "actor/kl"])
    heights = [int.from_bytes(path.read_bytes()[20:24], "big") for path in (one, two)]
    assert one.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and heights[1] == 2 * heights[0] > 300


def test_png_of_several_runs_has_one_colour_a_run(tmp_path: Path) -> None:
    """The first run has no validation: its blue is in the lower panel alone, and in the legend above both."""
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    score, validation = "reward/score/mean", "validation/score/mean"
    runs = {
        "_first": [{"step": step, score: 0.25} for step in range(1, 50)],
        "no $^$ formula": [{"step": 0, validation: 0.5}] + [{"step": step, score: 0.75} for step in range(1, 50)],
    }
    image = imread(reward_curve_png(runs, tmp_path / "both.png", [validation, score]))[:, :, :3]
    assert image.shape == (640, 800, 3)

    def rows_of(*color: int) -> set[int]:
        return {int(row) for row in (abs(image - [part / 255 for part in color]) < 0.01).all(axis=2).nonzero()[0]}

    blue, orange = rows_of(31, 119, 180), rows_of(255, 127, 14)
    legend, upper, lower = (set(range(*ends)) for ends in ((0, 35), (35, 330), (330, 640)))
    assert blue & legend and not blue & upper and blue & lower
    assert orange & legend and len(orange & upper) >= 3 and orange & lower  # one validation: a marker, no line
    assert min(orange & lower) < min(blue & lower)


def test_a_name_that_the_font_has_no_signs_for(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = {name: [{"step": step, "reward/score/mean": 0.25} for step in (1, 2)] for name in ("\N{ROCKET}", "\u6f22")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reward_curve_png(runs, tmp_path / "both.png").stat().st_size > 1000


def test_an_older_picture_stays_where_a_new_one_cant_be_written(metrics: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "x.png"
    picture.write_text("as it was")
    with files_of_at_most(1000), pytest.raises(OSError, match="too large"):
        reward_curve_png(metrics, picture)
    assert picture.read_text() == "as it was" and not list(tmp_path.glob(".*"))
    with pytest.raises(ConfigError, match=r"must end in \.png, got 'x\.jpg'"):
        reward_curve_png(metrics, tmp_path / "x.jpg")


def test_png_of_a_key_that_is_not_there(metrics: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="did you mean 'actor/kl'"):
        reward_curve_png(metrics, tmp_path / "x.png", ["actor/kll"])
    assert not (tmp_path / "x.png").exists()


def test_png_without_matplotlib(metrics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(module: str, *args: Any, **kwargs: Any) -> Any:
        if module.startswith("matplotlib"):
            raise ImportError(module)
        return real(module, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"verl\[plot\]"):
        reward_curve_png(metrics, tmp_path / "x.png")
