"""Metrics of one step: pieces of unequal size come in, one number a key goes out.

A mean is carried as (sum, count) until the very end, so that micro-batches and ranks of unequal size weigh what they
hold. Tensors stay where they are; ``result`` moves them in one transfer a device. Knows nothing of what a key means.

Keys are ``role/quantity[/stat]``. The stat at the end says how pieces join: ``/max``, ``/min`` and ``/sum`` do that,
anything else is a mean. ``docs/metrics.md`` defines every key.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verl.observe.keys import VALIDATION as VALIDATION

Scalar = float | Tensor
MetricValue = Scalar | tuple[Scalar, Scalar]
"""What ``MetricSums.update`` takes: (sum, count) for a mean; for a ``/max``, ``/min`` or ``/sum`` one scalar, or
(value, count of what it was taken over)."""


@dataclass(frozen=True)
class _Cell:
    """One key's pieces so far, and how many elements they were taken over."""

    kind: str
    value: Scalar
    count: Scalar = 1.0

    def joined(self, other: _Cell) -> _Cell:
        join = _plus if self.kind in ("mean", "sum") else partial(_extreme, self.kind)
        return replace(self, value=join(self.value, other.value), count=_plus(self.count, other.count))


class MetricSums:
    """Metrics that can be added to, merged and, once, divided. Pickles; ``cpu`` first where the receiver has no GPU."""

    def __init__(self) -> None:
        self._cells: dict[str, _Cell] = {}

    def __len__(self) -> int:
        return len(self._cells)

    def __contains__(self, key: str) -> bool:
        return key in self._cells

    def add_mean(self, key: str, total: Scalar, count: Scalar) -> None:
        """A piece of a mean: ``total`` is the sum over ``count`` elements. Both stay on their device."""
        self._put(key, _Cell("mean", _scalar(key, total), _scalar(key, count)))

    def add_max(self, key: str, value: Scalar, count: Scalar = 1.0) -> None:
        """A candidate for the largest value, unless it was taken over ``count`` 0 elements; NaN wins, so it shows."""
        self._put(key, _Cell("max", _where_any(_scalar(key, value), count, -math.inf), _scalar(key, count)))

    def add_min(self, key: str, value: Scalar, count: Scalar = 1.0) -> None:
        """A candidate for the smallest value, unless it was taken over ``count`` 0 elements; NaN wins, so it shows."""
        self._put(key, _Cell("min", _where_any(_scalar(key, value), count, math.inf), _scalar(key, count)))

    def add_sum(self, key: str, value: Scalar) -> None:
        """A piece of a total, such as a number of tokens."""
        self._put(key, _Cell("sum", _scalar(key, value)))

    def add_values(self, key: str, values: Tensor | Sequence[float], mask: Tensor | None = None) -> None:
        """``key/mean``, ``key/max`` and ``key/min`` over the elements of ``values`` (any shape) where ``mask`` is True.

        Nothing is added where no element counts: a mean over nothing has no value.
        """
        values = torch.as_tensor(values)
        if mask is not None:
            values = values[mask]
        if values.numel() == 0:
            return
        values = values.detach().to(_wide(values.device))
        self.add_mean(f"{key}/mean", values.sum(), values.numel())
        self.add_max(f"{key}/max", values.max())
        self.add_min(f"{key}/min", values.min())

    def update(self, metrics: Mapping[str, MetricValue]) -> None:
        """Add a piece of each key, joined as the key's end says.

        Raises ValueError for a lone scalar under a key that is a mean: its weight against the other pieces is unknown.
        """
        for key, value in metrics.items():
            kind = key.rpartition("/")[2]
            if kind not in ("max", "min", "sum") and not isinstance(value, tuple):
                raise ValueError(f"metric {key!r} is a mean: give (sum, count), or end the key in /max, /min or /sum")
            total, count = value if isinstance(value, tuple) else (value, 1.0)
            if kind == "max":
                self.add_max(key, total, count)
            elif kind == "min":
                self.add_min(key, total, count)
            elif kind == "sum":
                self.add_sum(key, total)
            else:
                self.add_mean(key, total, count)

    def merge(self, other: MetricSums) -> None:
        """Add all of ``other``'s pieces, whatever ranks or micro-batches they come from."""
        for key, cell in other._cells.items():
            self._put(key, cell)

    def cpu(self) -> MetricSums:
        """A copy holding Python numbers only, made with one transfer a device."""
        copy = MetricSums()
        numbers = _fetch([x for cell in self._cells.values() for x in (cell.value, cell.count)])
        for i, (key, cell) in enumerate(self._cells.items()):
            copy._cells[key] = _Cell(cell.kind, numbers[2 * i], numbers[2 * i + 1])
        return copy

    def result(self) -> dict[str, float]:
        """One number a key. What was taken over no element has no value and is left out: NaN means bad numbers."""
        cells = {key: cell for key, cell in self.cpu()._cells.items() if cell.count != 0}
        return {
            key: float(cell.value) / float(cell.count) if cell.kind == "mean" else float(cell.value)
            for key, cell in cells.items()
        }

    def _put(self, key: str, cell: _Cell) -> None:
        old = self._cells.get(key)
        if old is not None and old.kind != cell.kind:
            raise ValueError(f"metric {key!r} was a {old.kind} and is now a {cell.kind}; give each its own key")
        self._cells[key] = cell if old is None else old.joined(cell)


def merged_over_ranks(sums: MetricSums, group: Any = None) -> MetricSums:
    """The pieces of every rank of ``group`` (a torch.distributed process group, None for the default), on every rank.

    Ranks may hold different keys. Without an initialised torch.distributed, ``sums`` itself on the CPU.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return sums.cpu()
    pieces: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(pieces, sums.cpu(), group=group)
    merged = MetricSums()
    for piece in pieces:
        merged.merge(piece)
    return merged


class PhaseTimer:
    """Seconds spent in each phase of a step, as ``timing/<phase>_s``.

    A phase may come several times, its seconds add up, and phases may nest. Queued GPU work is waited for at both
    ends, so that a phase pays for its own work; each phase is also a named span in a profiler's trace.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's wall-clock seconds under ``timing/<name>_s``, also when it raises."""
        _wait_for_device()
        start = time.perf_counter()
        try:
            with torch.profiler.record_function(name):
                yield
                _wait_for_device()
        finally:
            self._seconds[name] += time.perf_counter() - start

    def result(self) -> dict[str, float]:
        """``timing/<phase>_s`` of every phase since the last ``reset``."""
        return {f"timing/{name}_s": seconds for name, seconds in self._seconds.items()}

    def reset(self) -> None:
        """Forget all phases, at the start of a step."""
        self._seconds.clear()


def _wait_for_device() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _scalar(key: str, value: Scalar) -> Scalar:
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() != 1:
        raise ValueError(f"metric {key!r} takes scalars, got a tensor of shape {list(value.shape)}")
    return value.detach().reshape(()).to(_wide(value.device))


def _where_any(value: Scalar, count: Scalar, otherwise: float) -> Scalar:
    """``value``, or ``otherwise`` where ``count`` is 0; without moving a tensor."""
    if isinstance(count, Tensor):
        value = torch.as_tensor(value, dtype=_wide(count.device), device=count.device)
        return torch.where(count.detach().reshape(()) > 0, value, otherwise)
    return value if count else otherwise


def _plus(a: Scalar, b: Scalar) -> Scalar:
    return a + b.to(a.device) if isinstance(a, Tensor) and isinstance(b, Tensor) else a + b


def _extreme(kind: str, a: Scalar, b: Scalar) -> Scalar:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        device = a.device if isinstance(a, Tensor) else b.device  # type: ignore[union-attr]  # one of them is a tensor
        pair = [torch.as_tensor(x, dtype=_wide(device), device=device) for x in (a, b)]
        return torch.maximum(*pair) if kind == "max" else torch.minimum(*pair)
    if math.isnan(a) or math.isnan(b):
        return math.nan
    return max(a, b) if kind == "max" else min(a, b)


def _fetch(scalars: list[Scalar]) -> list[float]:
    """Python numbers for all ``scalars``: the tensors of one device cross together."""
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for i, scalar in enumerate(scalars):
        if isinstance(scalar, Tensor):
            by_device[scalar.device].append(i)
    numbers: list[float] = [0.0 if isinstance(x, Tensor) else x for x in scalars]
    for places in by_device.values():
        stacked = torch.stack([x for x in (scalars[i] for i in places) if isinstance(x, Tensor)])
        for i, number in zip(places, stacked.tolist(), strict=True):
            numbers[i] = number
    return numbers
