"""How much of a GPU's communication hides behind its compute: a trace's kernels in, seconds out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Span = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """Of one GPU, from the start of the first kernel to the end of the last, in seconds.

    span_s           that time
    compute_s        in which kernels other than NCCL's ran
    communication_s  in which NCCL's ran: transfers, and the wait for other ranks
    hidden_s         in which both did
    idle_s           in which nothing ran
    """

    span_s: float
    compute_s: float
    communication_s: float
    hidden_s: float
    idle_s: float

    @property
    def hidden_frac(self) -> float:
        """Share of the communication that compute covers; 1 without communication."""
        return self.hidden_s / self.communication_s if self.communication_s else 1.0


def overlap_of(trace: Mapping[str, Any]) -> Overlap | None:
    """Of a Chrome trace's kernels; None where there are none (no GPU)."""
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    if not kernels:
        return None
    is_communication = ["nccl" in event["name"].lower() for event in kernels]
    spans = [(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in kernels]
    ours = _length(span for span, is_nccl in zip(spans, is_communication, strict=True) if not is_nccl)
    theirs = _length(span for span, is_nccl in zip(spans, is_communication, strict=True) if is_nccl)
    busy = _length(spans)
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    return Overlap(*(us / 1e6 for us in (whole, ours, theirs, ours + theirs - busy, whole - busy)))


def _length(spans: Iterable[Span]) -> float:
    """Time that at least one of ``spans`` covers."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
