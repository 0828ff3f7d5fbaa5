"""Results on their way from the device to the host: what was launched, for which rows, and when it is there."""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows
from typing import Any, Literal

import torch
from torch import Tensor

from verl.rollout.native.advance import Outputs
from verl.rollout.native.sequence import Sequence

Kind = Literal["prefill", "decode"]


class Clock:
    """Moments on the device's own time line."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"

    def now(self) -> Any:
        """A moment behind all that was launched so far."""
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Between two moments that have passed."""
        return float(start.elapsed_time(end)) / 1e3 if self._on_cuda else end - start


class Pending:
    """Sampled tokens and log-probs of ``rows``, [steps, rows]; the copy to the host is launched here."""

    def __init__(self, kind: Kind, rows: Rows[Sequence], outputs: Outputs, clock: Clock, start: Any) -> None:
        self.kind: Kind = kind
        self.rows = list(rows)
        self.steps = len(outputs.tokens)
        self._clock, self._start, self._end = clock, start, clock.now()
        self._tokens, self._log_probs = _to_host(outputs.tokens), _to_host(outputs.log_probs)
        self._copied = clock.now()

    def result(self) -> tuple[Tensor, Tensor]:
        """Wait for them: tokens int32, -1 where a row had ended, and log-probs."""
        if isinstance(self._copied, torch.cuda.Event):
            self._copied.synchronize()
        return self._tokens, self._log_probs

    @property
    def seconds(self) -> float:
        """What it took on the device; after ``result``."""
        return self._clock.seconds(self._start, self._end)


def _to_host(values: Tensor) -> Tensor:
    if not values.is_cuda:
        return values.clone()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy from the host without waiting for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
