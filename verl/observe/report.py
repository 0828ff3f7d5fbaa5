"""A run at a glance: its folder comes in, a text goes out. Reads files only, also while the run goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.common.errors import DataError
from verl.observe.console import duration
from verl.observe.curve import reward_curve_text
from verl.observe.history import column, load_metrics
from verl.observe.keys import CURVES, STEP_S, TOKENS_PER_S, VALIDATION

if TYPE_CHECKING:
    from rich.text import Text

ENDS = 10
"""Steps at the beginning and at the end whose mean is shown."""

_SHOWN_CHARS = 600


def summarise(run_dir: Path, width: int = 80) -> Text:
    """The run's curve (of its reward, or its margin or loss), the mean of its first and last ten steps, time, tokens a
    second, the best validation, and three responses of the last sampled step: its worst, its middle and its best.

    run_dir  holds ``metrics.jsonl`` and, where responses were kept, ``rollouts/step_000001.jsonl`` and so on
    Returns a text for ``rich.print``, in which no bracket of a response is markup; ``.plain`` is the string.
    Raises DataError when the folder holds no metrics.
    """
    from rich.text import Text

    rows = finished_steps(run_dir)
    parts = ["\n".join(_numbers(rows))]
    if (key := curve_key(rows)) is not None:
        steps, values = column(rows, key)
        parts.insert(0, f"{key}\n{reward_curve_text(values, width, steps=steps)}")
    parts += [_sample(name, row) for name, row in sample_responses(run_dir)]
    return Text("\n\n".join(parts) + "\n")


def finished_steps(run_dir: Path) -> list[dict[str, float]]:
    """The lines of the run's metrics.jsonl; raises DataError when there is none."""
    rows = load_metrics(run_dir)
    if not rows:
        raise DataError(f"{run_dir} holds no finished step yet")
    return rows


def curve_key(rows: Sequence[Mapping[str, float]]) -> str | None:
    """The key that the run is judged by; None where no step has any."""
    return next((key for key in CURVES if any(key in row for row in rows)), None)


def mean_of_ends(rows: Sequence[Mapping[str, float]], key: str) -> tuple[int, float, float] | None:
    """How many steps an end has (ten, of a shorter run all), and the mean of ``key`` over the first and the last ones.

    None where no step has a finite value; the others don't count.
    """
    values = _values(rows, key)
    if not values:
        return None
    count = min(ENDS, len(values))
    return count, _mean(values[:count]), _mean(values[-count:])


def best(rows: Sequence[Mapping[str, float]], key: str) -> tuple[float, int] | None:
    """The highest value of ``key`` and the first step that has it; None where no step has a finite value."""
    points = [(row[key], int(row["step"])) for row in rows if key in row and math.isfinite(row[key])]
    return max(points, key=lambda point: (point[0], -point[1]), default=None)


def seconds_a_step(rows: Sequence[Mapping[str, float]]) -> float | None:
    """Mean wall-clock seconds of a step, without validation and checkpoint; None where no step says."""
    seconds = _values(rows, STEP_S)
    return _mean(seconds) if seconds else None


def print_report(run_dir: Path) -> None:
    """``summarise`` on the standard output; no wider than the terminal."""
    from rich.console import Console

    console = Console()
    console.print(summarise(run_dir, min(console.width, 100)), end="", soft_wrap=True)


def sample_responses(run_dir: Path) -> list[tuple[str, dict[str, Any]]]:
    """("worst" | "middle" | "best", row) of the last step whose responses were kept; fewer where it has fewer.

    Each row has step, row_id, prompt, response, score, ground_truth and finish_reason. Rows without a score don't
    take part.
    """
    for path in sorted((run_dir / "rollouts").glob("step_*.jsonl"), reverse=True):
        rows = sorted(_scored(path), key=lambda row: float(row["score"]))
        if rows:
            picks = {"worst": 0, "middle": len(rows) // 2, "best": len(rows) - 1}
            chosen = {place: name for name, place in picks.items()}  # one name a row where there are few
            return [(name, rows[place]) for place, name in sorted(chosen.items())]
    return []


def _numbers(rows: Sequence[Mapping[str, float]]) -> list[str]:
    last = int(rows[-1]["step"])
    lines = [_line("steps", f"{last}")]
    key = curve_key(rows)
    if key is not None and (ends := mean_of_ends(rows, key)):
        count, first, final = ends
        lines.append(_line(f"mean {CURVES[key]}, first {count}", f"{first:.4f}"))
        lines.append(_line(f"mean {CURVES[key]}, last {count}", f"{final:.4f}"))
    if (seconds := seconds_a_step(rows)) is not None:
        total = duration(sum(_values(rows, STEP_S)))
        lines.append(_line("time", f"{total}  ({seconds:.2f} s a step)"))
    speeds = _values(rows, TOKENS_PER_S)
    if speeds:
        lines.append(_line("tokens/s", f"{_mean(speeds):,.0f}"))
    return lines + _best_validations(rows)


def _best_validations(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """The best value of every validation mean, with its step; the higher the better."""
    keys = sorted(
        {key for row in rows for key in row if key.startswith(f"{VALIDATION}score/") and key.endswith("/mean")}
    )
    lines = []
    for key in keys:
        if (found := best(rows, key)) is not None:
            lines.append(_line(f"best {key}", f"{found[0]:.4f}  (step {found[1]})"))
    return lines


def _values(rows: Sequence[Mapping[str, float]], key: str) -> list[float]:
    return [row[key] for row in rows if key in row and math.isfinite(row[key])]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _line(name: str, value: str) -> str:
    return f"{name:<28}{value}"


def _scored(path: Path) -> list[dict[str, Any]]:
    """Rows of ``path`` with a finite score; a last line that is still being written is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        score = row.get("score") if isinstance(row, dict) else None
        if isinstance(score, int | float) and math.isfinite(score):
            rows.append(row)
    return rows


def _sample(name: str, row: Mapping[str, Any]) -> str:
    head = f"--- {name} response of step {row.get('step')}: score {row['score']:g}"
    if row.get("finish_reason") is not None:
        head += f", ended by {str(row['finish_reason']).lower()}"
    lines = [head, f"prompt: {_short(row.get('prompt'))}", f"response: {_short(row.get('response'))}"]
    if row.get("ground_truth") is not None:
        lines.append(f"ground truth: {_short(row['ground_truth'])}")
    return "\n".join(lines)


def _short(value: Any) -> str:
    """At most 600 characters: of a longer text the beginning and the end, which holds the answer."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    clean = "".join(char if char.isprintable() or char in "\n\t" else "?" for char in text)
    if len(clean) <= _SHOWN_CHARS:
        return clean
    half = _SHOWN_CHARS // 2
    return f"{clean[:half]} [.. {len(clean) - 2 * half} characters ..] {clean[-half:]}"
