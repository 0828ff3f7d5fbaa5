"""Several runs side by side: their folders come in, a table and the keys worth a panel go out. Reads files only."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl.observe.history import Runs
from verl.observe.keys import CURVES, STEP_S, VALIDATION_SCORE
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
    """A line a run under a line of headings: steps, the mean of the first and last ten steps (of a shorter run, all),
    the best validation and its step, seconds a step. What a run doesn't have is a ``-``, what it has no finite value of
    ``nan``. Where the runs' means aren't of equally many steps a last line says so.

    The means are of what a run is judged by: its reward, or its margin or loss; of runs of several kinds, of each.
    """
    judged_by = _judged_by(runs)
    counts = {found[0] for rows in runs.values() for key in judged_by if (found := mean_of_ends(rows, key))}
    of_all = f" {min(counts)}" if len(counts) == 1 else ""
    ends = [f"{CURVES[key]}, {end}{of_all}" for key in judged_by for end in ("first", "last")]
    table = [["run", "steps", *ends, "best validation", "at step", "s a step"]]
    table += [[name, *_cells(rows, judged_by)] for name, rows in runs.items()]
    widths = [max(len(cell) for cell in cells) for cells in zip(*table, strict=True)]
    lines = [
        "  ".join(
            [f"{name:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))]
        )
        for name, *cells in table
    ]
    if len(counts) > 1:
        lines.append(f"first, last: the mean of {ENDS} steps with a value, of a run with fewer that of all")
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
    cells = [str(int(rows[-1]["step"]))]
    for key in judged_by:
        _, first, last = mean_of_ends(rows, key) or (0, None, None)
        cells += [_cell(rows, key, first, 4), _cell(rows, key, last, 4)]
    score, step = best(rows, VALIDATION_SCORE) or (None, None)
    cells += [_cell(rows, VALIDATION_SCORE, score, 4), "-" if step is None else str(step)]
    return [*cells, _cell(rows, STEP_S, seconds_a_step(rows), 2)]


def _cell(rows: Sequence[Mapping[str, float]], key: str, value: float | None, digits: int) -> str:
    """``value``, which is None where no row has a finite value of ``key``: then whether one has ``key`` at all."""
    if value is None:
        return "nan" if any(key in row for row in rows) else "-"
    return f"{value:.{digits}f}"
