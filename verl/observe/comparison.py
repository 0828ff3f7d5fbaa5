"""Several runs side by side: their folders come in, a table and the keys worth a panel go out. Reads files only."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl.observe.history import Runs
from verl.observe.keys import CURVES, VALIDATION_SCORE
from verl.observe.report import ENDS, best, curve_key, finished_steps, mean_of_ends, seconds_a_step


def load_runs(run_dirs: Sequence[Path]) -> Runs:
    """The finished steps of each folder, in the order given; a folder given twice is there once.

    A run's name is the last part of its path, with as many of those before it as tell it from the other runs.
    Raises DataError for a folder without a finished step.
    """
    paths = [Path(os.path.abspath(path)).parts for path in run_dirs]
    return {_name(path, {*paths} - {path}): finished_steps(run) for path, run in zip(paths, run_dirs, strict=True)}


def panel_keys(runs: Runs) -> list[str]:
    """What a picture of the runs shows: what they are judged by, and above it, of several, the validation score."""
    has_validation = any(VALIDATION_SCORE in row for rows in runs.values() for row in rows)
    return [*([VALIDATION_SCORE] if len(runs) > 1 and has_validation else []), *_judged_by(runs)]


def comparison(runs: Runs) -> str:
    """A line a run under a line of headings: steps, the mean of the first and last ten steps, the best validation and
    its step, seconds a step. What a run doesn't have is a ``-``.

    The means are of what a run is judged by: its reward, or its margin or loss; of runs of several kinds, of each.
    """
    judged_by = _judged_by(runs)
    ends = [f"{CURVES[key]}, {end} {ENDS}" for key in judged_by for end in ("first", "last")]
    table = [["run", "steps", *ends, "best validation", "at step", "s a step"]]
    table += [[name, *_cells(rows, judged_by)] for name, rows in runs.items()]
    widths = [max(len(cell) for cell in cells) for cells in zip(*table, strict=True)]
    lines = [
        "  ".join(
            [f"{name:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))]
        )
        for name, *cells in table
    ]
    return "\n".join(lines) + "\n"


def print_comparison(runs: Runs) -> None:
    """``comparison`` on the standard output, a run on one line however long it is."""
    from rich.console import Console
    from rich.text import Text

    Console().print(Text(comparison(runs)), end="", soft_wrap=True)


def _name(path: tuple[str, ...], others: set[tuple[str, ...]]) -> str:
    """The shortest end of ``path`` that none of ``others`` has."""
    return next(
        str(Path(*path[-length:]))
        for length in range(1, len(path) + 1)
        if all(other[-length:] != path[-length:] for other in others)
    )


def _judged_by(runs: Runs) -> list[str]:
    keys = {curve_key(rows) for rows in runs.values()}
    return [key for key in CURVES if key in keys]


def _cells(rows: Sequence[Mapping[str, float]], judged_by: Sequence[str]) -> list[str]:
    means: list[float | None] = []
    for key in judged_by:
        _, *both = mean_of_ends(rows, key) or (0, None, None)
        means += both
    score, step = best(rows, VALIDATION_SCORE) or (None, None)
    return [
        str(int(rows[-1]["step"])),
        *(_cell(mean, 4) for mean in means),
        _cell(score, 4),
        _cell(step, 0),
        _cell(seconds_a_step(rows), 2),
    ]


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
