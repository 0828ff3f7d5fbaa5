"""Traces of compute, memory and communication, for chrome://tracing or ui.perfetto.dev.

``VerlProfiler`` is switched on and off by hand around any code; ``StepProfiler`` traces the steps and ranks that the
configuration names. Both write a file that is whole, parses as JSON, and lies where it was asked for; without being
asked they write nothing and make no folder. Neither knows what a step does.
"""

from __future__ import annotations

import atexit
import gzip
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal

import torch

from verl.common.errors import VerlError
from verl.common.ranks import is_distributed, own_rank
from verl.common.section import Section
from verl.observe.communication import CommunicationEvent, CommunicationRecorder
from verl.observe.overlap import Overlap, overlap_of

_log = logging.getLogger(__name__)

DEFAULT_TRACE = "verl_trace.json"


class ProfileConfig(Section):
    """Which steps are traced. Nothing is unless ``steps`` names some."""

    formerly: ClassVar[dict[str, str]] = {
        "with_stacks": "write record: [stacks]",
        "record_memory": "write record: [memory]",
    }

    steps: list[int] = []
    """Steps to trace, counted from 1; each makes ``<run>/traces/step_000002.rank0.json``. Empty: off, at no cost."""
    ranks: list[int] | None = None
    """Ranks that write a trace; left out, all."""
    record: list[Literal["stacks", "memory"]] = []
    """Also record `stacks`, the Python stack of every operation (larger and slower), or `memory`, every allocation
    (torch then follows only the thread that runs the step, and what it starts)."""


class StepProfiler:
    """One trace for each selected step on each selected rank: ``<folder>/step_000002.rank0.json``.

    folder       where traces go; made when the first is written
    rank         this process among all that trace
    total_steps  steps of the run; left out, nobody is warned of what a selection doesn't match
    world_size   number of those processes; left out, torch.distributed's, else rank + 1
    A selection that matches no step or no rank is a warning, from rank 0. A trace that can't be written is a warning.
    """

    def __init__(
        self,
        config: ProfileConfig,
        folder: Path,
        rank: int,
        total_steps: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._config, self._folder, self._rank = config, folder, rank
        is_selected = config.ranks is None or rank in config.ranks
        self._steps = frozenset(config.steps) if is_selected else frozenset()
        if rank == 0 and total_steps is not None:
            for warning in unmatched(config, total_steps, world_size or _world_size(rank)):
                _log.warning("%s", warning)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Trace the block when step ``number`` is selected, also when it raises; otherwise do nothing."""
        recording = self._begin(number) if number in self._steps else None
        if recording is None:
            yield
            return
        try:
            with torch.profiler.record_function(f"step {number}"):
                yield
        finally:
            self._write(recording, number)

    def _begin(self, number: int) -> _Recording | None:
        record = self._config.record
        recording = _Recording(memory="memory" in record, communication=True, stacks="stacks" in record)
        try:
            recording.start()
        except (VerlError, RuntimeError) as error:
            _log.warning("step %d is not traced: %s", number, error)
            return None
        return recording

    def _write(self, recording: _Recording, number: int) -> None:
        path = self._folder / f"step_{number:06d}.rank{self._rank}.json"
        try:
            recording.stop()
            recording.write(path)
        except (OSError, RuntimeError, ValueError) as error:  # the block's own error must come through
            _log.warning("the trace %s could not be written: %r", path, error)


class VerlProfiler:
    """Record compute, memory and communication between ``start`` and ``stop``, around any code.

    record_memory         record every allocation; torch then follows only the calling thread and what it starts
    record_communication  record each collective's op, bytes, group and duration (``communication`` lists them)
    output_dir            folder of the traces that are exported under a relative path; made on export

    As a context manager it exports ``verl_trace.json`` at the end. A program that ends, or dies of an exception,
    before ``stop`` still leaves ``verl_trace.json`` in ``output_dir``.
    """

    def __init__(
        self,
        record_memory: bool = True,
        record_communication: bool = True,
        output_dir: str | os.PathLike[str] = "./profile_logs",
    ) -> None:
        self.output_dir = Path(output_dir)
        self._options = {"memory": record_memory, "communication": record_communication, "stacks": False}
        self._recording: _Recording | None = None
        self._is_running = False

    def start(self) -> None:
        """Begin to record; what an earlier ``start`` and ``stop`` recorded is dropped.

        Raises VerlError when this profiler or another one is running.
        """
        if self._is_running:
            raise VerlError("VerlProfiler.start() was called twice: call stop() first")
        recording = _Recording(**self._options)
        recording.start()
        self._recording, self._is_running = recording, True
        atexit.register(self._rescue)

    def stop(self) -> None:
        """End the recording. Raises VerlError when none is running."""
        if self._recording is None or not self._is_running:
            raise VerlError("VerlProfiler.stop() was called without start()")
        self._is_running = False
        atexit.unregister(self._rescue)
        self._recording.stop()

    def export_chrome_trace(self, path: str | os.PathLike[str] = DEFAULT_TRACE) -> Path:
        """Write the recording as a Chrome trace, gzipped when the name ends in ``.gz``, and return where it lies.

        path  a relative one lies in ``output_dir``; an absolute one where it says. Under torch.distributed every
              rank but 0 puts its rank into the name (``verl_trace.rank1.json``), so that none overwrites another's.
        Raises VerlError before ``stop``.
        """
        recording = self._stopped("export_chrome_trace")
        target = self.output_dir / path
        rank = own_rank()
        if rank:
            stem, dot, suffixes = target.name.partition(".")
            target = target.with_name(f"{stem}.rank{rank}{dot}{suffixes}")
        recording.write(target)
        return target

    @property
    def communication(self) -> list[CommunicationEvent]:
        """Every collective of the recording, by start. Raises VerlError before ``stop``."""
        return self._stopped("communication").communication()

    @property
    def overlap(self) -> Overlap | None:
        """How much of the GPU's communication its compute covers; None without a GPU. Raises VerlError before
        ``stop``."""
        return self._stopped("overlap").overlap()

    def __enter__(self) -> VerlProfiler:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._is_running:
            self.stop()
        self.export_chrome_trace()

    def _stopped(self, what: str) -> _Recording:
        if self._recording is None or self._is_running:
            state = "stop() was not called yet" if self._is_running else "nothing was recorded: call start() and stop()"
            raise VerlError(f"VerlProfiler.{what}: {state}")
        return self._recording

    def _rescue(self) -> None:
        """The program ends while recording: leave the trace."""
        self.stop()
        _log.warning("VerlProfiler was never stopped; its trace is %s", self.export_chrome_trace())


class _Recording:
    """One run of torch's profiler with the communication beside it. torch allows one at a time, and crashes on two."""

    _active: _Recording | None = None

    def __init__(self, *, memory: bool, communication: bool, stacks: bool) -> None:
        self._profile = torch.profiler.profile(
            activities=list(torch.profiler.supported_activities()),
            record_shapes=True,
            profile_memory=memory,
            with_stack=stacks,
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=not memory),
        )
        self._recorder = CommunicationRecorder() if communication else None
        self._trace: dict[str, Any] | None = None

    def start(self) -> None:
        if _Recording._active is not None or torch._C._autograd._profiler_enabled():
            raise VerlError("another profiler is running in this process, and torch allows one at a time")
        _Recording._active = self
        try:
            self._profile.start()
        except BaseException:
            _Recording._active = None
            raise
        if self._recorder is not None:
            self._recorder.start()

    def stop(self) -> None:
        _Recording._active = None
        if self._recorder is not None:
            self._recorder.stop()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # kernels still queued belong to the recording
        self._profile.stop()

    def communication(self) -> list[CommunicationEvent]:
        return [] if self._recorder is None else self._recorder.events(self._read())

    def overlap(self) -> Overlap | None:
        return overlap_of(self._read())

    def write(self, path: Path) -> None:
        """The trace as strict JSON, whole or not at all."""
        trace = dict(self._read())
        extra = [event.trace_event(int(trace["baseTimeNanoseconds"]), os.getpid()) for event in self.communication()]
        trace["traceEvents"] = trace["traceEvents"] + extra
        if (overlap := self.overlap()) is not None:
            trace["gpu"] = {**asdict(overlap), "hidden_frac": overlap.hidden_frac}
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            opener: Any = gzip.open if path.suffix == ".gz" else open
            with opener(aside, "wt", encoding="utf-8") as file:
                json.dump(trace, file)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        """What torch recorded. It gives a trace away once, and its names needn't be clean JSON or UTF-8."""
        if self._trace is None:
            folder = Path(tempfile.mkdtemp(prefix="verl-trace-"))
            try:
                self._profile.export_chrome_trace(str(folder / "trace.json"))
                text = (folder / "trace.json").read_bytes().decode("utf-8", errors="replace")
            finally:
                shutil.rmtree(folder)
            self._trace = json.loads(text, strict=False)
        return self._trace


def unmatched(config: ProfileConfig, total_steps: int, world_size: int) -> list[str]:
    """What the selection asks for and won't get, in a run of so many steps and processes."""
    if not config.steps:
        asked = sorted(name for name in config.model_fields_set if name != "steps" and getattr(config, name))
        return [f"profile.{name} is set, but profile.steps is empty: nothing is traced" for name in asked]
    warnings = []
    steps = sorted(step for step in set(config.steps) if not 1 <= step <= total_steps)
    if steps:
        warnings.append(f"profile.steps {steps} match no step of the run, which has 1 to {total_steps}: no trace")
    ranks = sorted(rank for rank in set(config.ranks or []) if not 0 <= rank < world_size)
    if ranks:
        warnings.append(f"profile.ranks {ranks} match no rank of the run, which has 0 to {world_size - 1}: no trace")
    if config.ranks == []:
        warnings.append("profile.ranks is empty, so no rank traces; leave it out to trace all")
    return warnings


def _world_size(rank: int) -> int:
    return torch.distributed.get_world_size() if is_distributed() else rank + 1
