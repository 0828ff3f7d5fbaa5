"""Many decode steps in a row without the host: launched one by one, or replayed from captured CUDA graphs.

A graph is captured for each number of rows (rounded up) and kind of sampling, the first time it is needed; all work
on the same state and share one memory pool. A graph reads weights, state and cache where they are: in-place updates
are seen, a cache that was given back and taken again elsewhere too; moved weights make it invalid.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from verl.rollout.native.advance import Outputs
from verl.rollout.native.decode import Step
from verl.rollout.native.row_state import RowState

_LOG = logging.getLogger(__name__)
_STEPS_ON_CUDA = 8  # the host looks only so often: what rows sample behind their end is wasted, at most twice this


class Steps(Protocol):
    """Runs steps on the first rows of a state."""

    most: int

    def run(self, rows: int, steps: int, truncates: bool) -> Outputs:
        """``steps`` steps, at most ``most``; their outputs are valid until the next run."""
        ...


class EagerSteps:
    """Launches every operation of every step."""

    def __init__(self, step: Step, state: RowState) -> None:
        device = state.columns.device
        self.most = _STEPS_ON_CUDA if device.type == "cuda" else 1
        self._step, self._state, self._device = step, state, device

    def run(self, rows: int, steps: int, truncates: bool) -> Outputs:
        """As ``Steps`` says."""
        out = Outputs.empty(steps, rows, self._device)
        for _ in range(steps):
            self._step(self._state.first(rows), out, truncates)
        return out


@dataclass
class _Graph:
    """A captured step on the first slots of the state."""

    graph: Any
    out: Outputs


class GraphSteps:
    """Replays graphs. A model whose forward can't be captured runs without, which is logged."""

    def __init__(self, step: Step, state: RowState, name: str) -> None:
        self.most = _STEPS_ON_CUDA
        self._step, self._state, self._name = step, state, name
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call,unused-ignore]
        self._side = torch.cuda.Stream(state.columns.device)  # type: ignore[no-untyped-call,unused-ignore]
        self._out = Outputs.empty(self.most, state.num_slots, state.columns.device)
        self._eager: EagerSteps | None = None

    def run(self, rows: int, steps: int, truncates: bool) -> Outputs:
        """As ``Steps`` says."""
        if self._eager is None:
            graph = self._graph(min(bucket(rows), self._state.num_slots), truncates)
        if self._eager is not None:
            return self._eager.run(rows, steps, truncates)
        self._out.count.zero_()
        for _ in range(steps):
            graph.graph.replay()
        return Outputs(graph.out.tokens[:steps, :rows], graph.out.log_probs[:steps, :rows], graph.out.count)

    def _graph(self, rows: int, truncates: bool) -> _Graph:
        """The graph for ``rows`` rows; where none can be captured, ``_eager`` is set."""
        key = (rows, truncates)
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture(rows, truncates)
            except RuntimeError as error:
                _LOG.warning("decoding %s without CUDA graphs: its forward can't be captured (%s)", self._name, error)
                self._eager = EagerSteps(self._step, self._state)
                return _Graph(None, self._out)
        return self._graphs[key]

    def _capture(self, rows: int, truncates: bool) -> _Graph:
        state, out = self._state.first(rows), self._out.first(rows)
        device = state.columns.device
        nobody = RowState.empty(rows, state.stop_ids.shape[1], state.tables.shape[1], device)
        nowhere = Outputs.empty(self.most, rows, device)
        graph = torch.cuda.CUDAGraph()
        self._side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._side):
            self._step(nobody, nowhere, truncates)  # compiles kernels; on rows of its own, since it really runs
            self._side.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._step(state, out, truncates)
            finally:
                graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(self._side)
        return _Graph(graph, out)


def bucket(rows: int) -> int:
    """The smallest of 1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, ... that is at least ``rows``."""
    if rows > 512:
        return -(-rows // 64) * 64
    if rows > 96:
        return -(-rows // 32) * 32
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if power >= 8 and rows <= power * 3 // 4 else power
