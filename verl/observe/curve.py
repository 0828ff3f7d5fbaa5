"""Curves of a run: metrics in, a drawing in characters or a PNG out.

Of what the numbers mean it knows only which are of validations: there are few, and each counts.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.common.errors import ConfigError, MissingExtra
from verl.common.files import write_bytes
from verl.observe.history import Runs, column, load_metrics
from verl.observe.keys import SCORE, VALIDATION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a Braille cell from U+2800, by row and column: 4 x 2 dots a character."""


def reward_curve_text(
    values: Sequence[float], width: int = 72, height: int = 12, steps: Sequence[int] | None = None
) -> str:
    """A line chart in Braille characters: ``height`` lines of curve, the largest and smallest value at its left, the
    first and last step under it. No line is wider than ``width`` (20 at least).

    values  one a step; what isn't finite is a gap
    steps   the steps of the values, rising; left out, 1, 2, ..
    """
    points = [(x, y) for x, y in zip(steps or range(1, len(values) + 1), values, strict=True) if math.isfinite(y)]
    if not points:
        return "(no values to draw)"
    low, high = min(y for _, y in points), max(y for _, y in points)
    labels = _labels(low, high, height)
    margin = max(len(label) for label in labels)
    columns = max(width, 20) - margin - 2
    rows = _braille(points, columns, height)
    lines = [f"{label:>{margin}} ┤{row}".rstrip() for label, row in zip(labels, rows, strict=True)]
    first, last = f"step {points[0][0]}", str(points[-1][0])
    axis = " " * margin + " └" + "─" * columns
    return "\n".join([*lines, axis, " " * (margin + 2) + first + last.rjust(columns - len(first))])


def reward_curve_png(metrics: Path | Runs, out_png: Path, keys: Sequence[str] = (SCORE,)) -> Path:
    """Draw ``keys`` over the steps, a panel a key, and return ``out_png``. A thin line is every step's value, a thick
    one its running mean over a twentieth of the run; of validations each value has a marker, and none is averaged.

    metrics  a metrics.jsonl, or the run folder that holds it; or the lines of runs by name, of which several get a
             colour each and a legend. A run without a key isn't in its panel
    Raises MissingExtra without matplotlib, DataError for a key that no step has, ConfigError for an ``out_png`` of
    another name than ``.png``, OSError where it can't be written: an older picture stays then.
    """
    if out_png.suffix.lower() != ".png":
        raise ConfigError(f"a picture of curves is a PNG: its name must end in .png, got {out_png.name!r}")
    runs = {"": load_metrics(metrics)} if isinstance(metrics, Path) else metrics
    for key in keys:
        column([row for rows in runs.values() for row in rows], key)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "plot", "a curve as PNG") from error
    figure = Figure(figsize=(8, 3.2 * len(keys)), layout="constrained")
    panels = figure.subplots(len(keys), squeeze=False, sharex=True)[:, 0]
    looks = {name: _look(place) for place, name in enumerate(runs)}
    for panel, key in zip(panels, keys, strict=True):
        for name, rows in runs.items():
            if any(key in row for row in rows):
                _draw(panel, key, *column(rows, key), looks[name])
        panel.set_ylabel(key)
        panel.grid(alpha=0.3)
    panels[-1].set_xlabel("step")
    if len(runs) > 1:
        _add_legend(figure, looks)
    drawn = BytesIO()
    dpi = 150 if len(runs) == 1 else 100  # thin lines of many colours pack badly
    with warnings.catch_warnings():  # a box stands for a sign of a run's name that the font doesn't have
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(drawn, dpi=dpi, format="png")
    write_bytes(out_png, drawn.getvalue())
    return out_png


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and the ``window - 1`` before it (fewer at the start); of what is finite among them."""
    means = []
    for end in range(1, len(values) + 1):
        part = [value for value in values[max(0, end - window) : end] if math.isfinite(value)]
        means.append(sum(part) / len(part) if part else math.nan)
    return means


def _look(place: int) -> dict[str, Any]:
    """Ten colours, then the same with another kind of line."""
    return {"color": f"C{place % 10}", "linestyle": ("-", "--", ":", "-.")[place // 10 % 4]}


def _draw(panel: Axes, key: str, steps: Sequence[int], values: Sequence[float], look: Mapping[str, Any]) -> None:
    if key.startswith(VALIDATION):
        panel.plot(steps, values, linewidth=1.5, marker="o", markersize=4, **look)
        return
    panel.plot(steps, values, alpha=0.35, linewidth=0.8, marker="." if len(steps) < 30 else "", **look)
    panel.plot(steps, running_mean(values, max(1, len(values) // 20)), linewidth=1.8, **look)


def _add_legend(figure: Figure, looks: Mapping[str, Mapping[str, Any]]) -> None:
    """Above the panels, where it covers no curve, in as many columns as the longest name leaves room for."""
    from matplotlib.lines import Line2D

    names = [name.replace("$", r"\$") for name in looks]  # $ begins a formula
    lines = [Line2D([], [], linewidth=2, **look) for look in looks.values()]
    columns = max(1, 90 // (max(len(name) for name in names) + 8))
    figure.legend(lines, names, loc="outside upper center", ncols=min(columns, len(names)), frameon=False)


def _labels(low: float, high: float, height: int) -> list[str]:
    labels = [""] * height
    labels[0] = f"{high:.4g}"
    if height > 1 and high > low:
        labels[-1] = f"{low:.4g}"
    return labels


def _braille(points: Sequence[tuple[int, float]], columns: int, height: int) -> list[str]:
    """``height`` strings of ``columns`` characters, with a line through ``points``."""
    dots = [[0] * columns for _ in range(height)]
    (first, _), (last, _) = points[0], points[-1]
    low, high = min(y for _, y in points), max(y for _, y in points)
    wide, tall = 2 * columns - 1, 4 * height - 1
    places = [
        (
            round((x - first) / max(1, last - first) * wide),
            round((high - y) / (high - low) * tall) if high > low else 0,
        )
        for x, y in points
    ]
    for start, end in zip(places, places[1:] or places, strict=False):
        for x, y in _line(start, end):
            dots[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    return ["".join(chr(0x2800 + bits) if bits else " " for bits in row) for row in dots]


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Every dot from ``start`` to ``end``."""
    length = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        tuple(round(a + (b - a) * i / length) for a, b in zip(start, end, strict=True))  # type: ignore[misc]
        for i in range(length + 1)
    ]
