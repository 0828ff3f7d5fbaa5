"""``metrics.jsonl``: one line a step, readable while the run goes on and after it was killed.

Each line is a JSON object ``{"step": n, "<key>": number, ..}``. JSON has no NaN: non-finite numbers are the strings
"NaN", "Infinity" and "-Infinity", which ``load_metrics`` turns back. Knows nothing of what the keys mean.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.common.errors import ConfigError, DataError, did_you_mean
from verl.common.files import write_text

_log = logging.getLogger(__name__)
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

METRICS_FILE = "metrics.jsonl"

Runs = Mapping[str, Sequence[Mapping[str, float]]]
"""The lines of each run's metrics.jsonl, by the run's name."""


class JsonlTracker:
    """Appends one line a step to ``path``, flushed at once; the log interval doesn't apply to it.

    path          the file; its folder is made
    resumed_step  None for a fresh run, which refuses a file that holds steps already. On resume, the last step that
                  the checkpoint holds: later lines are dropped (atomically), so that no step appears twice, and so is
                  a last line that a kill cut short.
    """

    def __init__(self, path: Path, resumed_step: int | None = None) -> None:
        self.path = path
        self._last: dict[str, Any] = {"step": -1}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._recover(resumed_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write ``metrics`` as the line of ``step``; a step logged again is merged into its line.

        Raises ValueError when a later step is in the file already, OSError when the disk is full; the file then holds
        whole lines still.
        """
        if step < self._last["step"]:
            raise ValueError(f"step {step} comes after step {self._last['step']} in {self.path}")
        line = {"step": step, **{key: _plain(value) for key, value in metrics.items()}}
        if step == self._last["step"]:
            line = {**self._last, **line}
            self._replace_last(line)
        else:
            self._append(_dump(line))
        self._last = line

    def close(self) -> None:
        """Nothing is held open or held back between the lines."""

    def _recover(self, resumed_step: int | None) -> None:
        raw = self.path.read_bytes() if self.path.exists() else b""
        rows = _parse(raw, self.path, is_strict=False)
        if resumed_step is None:
            if rows:
                raise ConfigError(
                    f"{self.path} already holds steps {rows[0]['step']} to {rows[-1]['step']}: resume that run, or "
                    "choose another run folder"
                )
            kept: list[dict[str, Any]] = []
        else:
            kept = [row for row in rows if row["step"] <= resumed_step]
        text = "".join(_dump(row) for row in kept)
        if text.encode() != raw:
            write_text(self.path, text)
        if kept:
            self._last = kept[-1]

    def _append(self, text: str) -> None:
        data = text.encode()
        with self.path.open("ab", buffering=0) as file:
            start = file.seek(0, os.SEEK_END)
            try:
                written = 0
                while written < len(data):
                    written += file.write(data[written:])
            except OSError:
                file.truncate(start)  # no half line for the next one to be glued to
                raise

    def _replace_last(self, line: Mapping[str, Any]) -> None:
        *kept, _ = self.path.read_bytes().splitlines(keepends=True)
        write_text(self.path, b"".join(kept).decode() + _dump(line))


def load_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of ``path`` (a metrics.jsonl, or a run folder that holds one), in order; "NaN" is NaN again.

    A last line that a kill cut short is left out. Raises DataError for a missing file or a broken line before the last.
    """
    file = path / METRICS_FILE if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"no metrics at {file}: give a run folder or its {METRICS_FILE}")
    rows = _parse(file.read_bytes(), file, is_strict=True)
    return [{key: _NON_FINITE.get(value, value) for key, value in row.items()} for row in rows]


def column(rows: Sequence[Mapping[str, float]], key: str) -> tuple[list[int], list[float]]:
    """The steps that have ``key`` and their values. Raises DataError naming the nearest key when none has it."""
    points = [(int(row["step"]), float(row[key])) for row in rows if key in row]
    if not points:
        known = sorted({name for row in rows for name in row} - {"step"})
        raise DataError(f"no step has the metric {key!r}{did_you_mean(key, known)}. Known: {', '.join(known)}")
    return [step for step, _ in points], [value for _, value in points]


def _parse(raw: bytes, path: Path, is_strict: bool) -> list[dict[str, Any]]:
    rows = []
    lines = raw.splitlines()
    for number, line in enumerate(lines, start=1):
        row = _row(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines) and is_strict:
            raise DataError(f"{path}, line {number}: not a JSON object with a whole number 'step': {line[:80]!r}")
        elif number < len(lines):
            _log.warning("%s, line %d is broken and was dropped: %r", path, number, line[:80])
    return rows


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _plain(value: Any) -> int | float | str:
    if isinstance(value, bool | int):
        return int(value)
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _dump(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
