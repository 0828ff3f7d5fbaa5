from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import pytest

from verl.observe.console import ConsoleTracker, describe, duration
from verl.observe.trackers import TrackConfig, TrackedRun

STEP = {"reward/score/mean": 0.5, "actor/kl": 0.00123, "perf/tokens_per_s": 12345.6, "actor/grad_norm": 9.0}


def tell(stream: io.TextIOBase, interval: int, total: int = 5) -> None:
    run = TrackedRun(folder=Path("unused"), total_steps=total, track=TrackConfig(log_interval=interval))
    tracker = ConsoleTracker(run, stream)  # type: ignore[arg-type]
    for step in range(1, total + 1):
        tracker.log(step, STEP if step != 3 else {**STEP, "validation/score/mean": 0.75})
    tracker.close()


def test_plain_lines_every_interval_and_validations_always() -> None:
    stream = io.StringIO()
    tell(stream, interval=2)
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 2/5", "step 3/5", "step 4/5", "step 5/5"]
    assert lines[0].startswith("step 2/5  reward 0.500  kl 1.23e-03  tokens/s 12,346")
    assert lines[1].startswith("step 3/5  validation/score/mean 0.750")
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


def test_no_control_codes_in_a_file_even_when_colour_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    tell(stream, interval=1)
    assert len(stream.getvalue().splitlines()) == 5 and "\x1b" not in stream.getvalue()


def test_a_terminal_gets_a_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pty = pytest.importorskip("pty")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    main, side = pty.openpty()
    with os.fdopen(side, "w") as stream:
        tell(stream, interval=1)
    shown = ""
    with contextlib.suppress(OSError):  # what Linux says at the end of a terminal whose other side is closed
        while piece := os.read(main, 1 << 16).decode():
            shown += piece
    os.close(main)
    assert "\x1b" in shown and "5/5" in shown and "reward 0.500" in shown


def test_describe_knows_what_is_missing() -> None:
    assert describe({"actor/grad_norm": 1.0}) == ""
    assert describe({"reward/score/mean": float("nan")}) == "reward nan"


def test_durations() -> None:
    seconds = [0, 44.6, 59.6, 185, 7620, 3600 * 99]
    assert [duration(s) for s in seconds] == ["0s", "45s", "1m00s", "3m05s", "2h07m", "4d03h"]
    assert duration(float("inf")) == "?"
