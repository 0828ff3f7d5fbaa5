"""Traces of steps whose roles run on workers: one file a worker process and selected step."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from verl.common.errors import VerlError
from verl.controller import Place, WorkerGroup, broadcast, dispatch
from verl.observe.profiler import ProfileConfig, StepProfiler, unmatched

log = logging.getLogger(__name__)


class Tracer:
    """The profiler of a worker process, beside the roles that it has.

    first_rank  of its pool, among the processes of all pools
    """

    def __init__(self, place: Place, config: ProfileConfig, folder: Path, first_rank: int) -> None:
        self._profiler = StepProfiler(config, folder, first_rank + place.rank)
        self._step = ExitStack()

    @dispatch(broadcast)
    def begin(self, number: int) -> None:
        """Trace what this process does from here on, if it is selected."""
        self._step.enter_context(self._profiler.step(number))

    @dispatch(broadcast)
    def end(self) -> None:
        """Write that."""
        self._step.close()


class RemoteProfiler:
    """A ``StepProfiler`` over the processes of ``groups`` of tracers, in the order of their ranks."""

    def __init__(self, groups: Sequence[WorkerGroup], config: ProfileConfig, total_steps: int) -> None:
        self._groups, self._steps = groups, frozenset(config.steps)
        for warning in unmatched(config, total_steps, sum(group.grid.world_size for group in groups)):
            log.warning("%s", warning)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Trace the block on the workers when step ``number`` is selected."""
        if number not in self._steps:
            yield
            return
        for begun in [group.begin(number) for group in self._groups]:
            begun.get()
        try:
            yield
        except BaseException:
            with contextlib.suppress(VerlError):  # the block's own error must come through
                self._end()
            raise
        self._end()

    def _end(self) -> None:
        for ended in [group.end() for group in self._groups]:
            ended.get()
