"""The run on the screen: a live progress line in a terminal, a plain line every ``log_interval`` steps elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from verl.observe.keys import CURVES, KL, TOKENS_PER_S

if TYPE_CHECKING:
    from rich.progress import Progress

    from verl.observe.trackers import TrackedRun

_SHOWN = {key: (name, "{:.3f}") for key, name in CURVES.items()} | {
    KL: ("kl", "{:.2e}"),
    TOKENS_PER_S: ("tokens/s", "{:,.0f}"),
}


class ConsoleTracker:
    """Step, reward, KL, tokens a second and time left; a validation's scores when there was one.

    stream  where to write; left out, the standard output. Anything but a terminal gets plain lines, so that a CI log
            or a file holds no control codes.
    """

    def __init__(self, run: TrackedRun, stream: TextIO | None = None) -> None:
        self._run = run
        self._stream = stream or sys.stdout
        self._start, self._first = time.monotonic(), (run.resumed_step or 0)
        self._progress = self._live() if _is_terminal(self._stream) else None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the step. The live line's position moves every step, its numbers every ``log_interval``."""
        shown = self._run.due_part(step, metrics)
        if self._progress is None:
            if shown:
                self._write_line(step, shown)
            return
        task = self._progress.task_ids[0]
        self._progress.update(task, completed=step)
        if shown:
            self._progress.update(task, numbers=describe(shown))

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._progress is not None:
            self._progress.stop()

    def _write_line(self, step: int, shown: Mapping[str, float]) -> None:
        total = self._run.total_steps
        left = self._seconds_left(step)
        parts = [f"step {step}/{total}", describe(shown), f"left {duration(left)}" if left else ""]
        self._stream.write("  ".join(part for part in parts if part) + "\n")
        self._stream.flush()

    def _seconds_left(self, step: int) -> float:
        done = max(1, step - self._first)
        return (time.monotonic() - self._start) / done * max(0, self._run.total_steps - step)

    def _live(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[numbers]}", markup=False),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(file=self._stream),
        )
        progress.add_task("", total=self._run.total_steps, completed=self._first, numbers="")
        progress.start()
        return progress


def describe(metrics: Mapping[str, float]) -> str:
    """The numbers worth a glance, as ``reward 0.512  kl 1.20e-03  tokens/s 1,234``, then validation scores."""
    parts = [f"{label} {form.format(metrics[key])}" for key, (label, form) in _SHOWN.items() if key in metrics]
    parts += [f"{key} {value:.3f}" for key, value in metrics.items() if key.startswith("validation/")]
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """``45s``, ``3m05s``, ``2h07m``, ``4d03h``; ``?`` for what isn't finite."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    for big, big_s, small, small_s in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= big_s:
            return f"{whole // big_s}{big}{whole % big_s // small_s:02d}{small}"
    return f"{whole}s"


def _is_terminal(stream: TextIO) -> bool:
    from rich.console import Console

    console = Console(file=stream)
    return console.is_terminal and not console.is_dumb_terminal and stream.isatty()
