"""The import path that the documentation gives for the profiler; ``verl.observe.profiler`` has it."""

from __future__ import annotations

from verl.observe.profiler import VerlProfiler

__all__ = ["VerlProfiler"]
