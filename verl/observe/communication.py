"""What a process sends and receives: every collective as op, bytes, group and duration.

While a ``CommunicationRecorder`` is on, calls through torch.distributed's process groups are noted as they are made,
whoever makes them; collectives that never pass through Python (functional ones, and the kernels of NCCL, which alone
know how long the GPU took) are read from the profiler's trace. Knows nothing of models or training.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

_OPS = {
    "all_reduce": ["allreduce", "allreduce_coalesced"],
    "all_gather": ["allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced",
                   "all_gather_single", "all_gather_single_coalesced"],
    "reduce_scatter": ["reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced",
                       "reduce_scatter_single", "reduce_scatter_single_coalesced"],
    "all_to_all": ["alltoall", "alltoall_base", "all_to_all_single"],
    "broadcast": ["broadcast"], "reduce": ["reduce"], "gather": ["gather"], "scatter": ["scatter"],
    "send": ["send"], "recv": ["recv", "recv_anysource"], "barrier": ["barrier"],
}  # fmt: skip
_FUNCTIONAL = {"all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "broadcast": "broadcast",
               "reduce_scatter_tensor": "reduce_scatter", "all_to_all_single": "all_to_all"}  # fmt: skip
_FUNCTIONAL_PREFIX = "_c10d_functional::"
_ITEM_BYTES = {"double": 8, "long": 8, "long int": 8, "float": 4, "int": 4, "c10::bfloat16": 2, "bfloat16": 2,
               "c10::half": 2, "half": 2, "short": 2, "char": 1, "signed char": 1, "byte": 1, "unsigned char": 1,
               "bool": 1}  # fmt: skip


@dataclass
class CommunicationEvent:
    """One collective, send or receive of this process.

    op           ``all_reduce``, ``all_gather``, ``send``, ..
    num_bytes    size of the larger of its input and its output on this rank; None where the trace doesn't say
    group        name of the process group; None where a functional collective doesn't say
    group_size   ranks in the group; None as above
    start_ns     when it was called (or its kernel began), nanoseconds since the epoch
    duration_ns  until its result was there: the wait for slower ranks is part of it
    """

    op: str
    num_bytes: int | None
    group: str | None
    group_size: int | None
    start_ns: int
    duration_ns: int
    on_gpu: bool = False

    def trace_event(self, base_ns: int, pid: int) -> dict[str, Any]:
        """The event as Chrome's trace format has it, on a track of its group."""
        args = {"bytes": self.num_bytes, "group": self.group, "group_size": self.group_size}
        return {
            "ph": "X",
            "cat": "communication",
            "name": self.op,
            "pid": pid,
            "tid": f"communication, group {self.group}",
            "ts": (self.start_ns - base_ns) / 1000,
            "dur": self.duration_ns / 1000,
            "args": {**args, "op": self.op, "duration_us": self.duration_ns / 1000},
        }


class CommunicationRecorder:
    """Notes the calls between ``start`` and ``stop``, of every thread. One at a time; costs nothing when off."""

    def __init__(self) -> None:
        self._events: list[CommunicationEvent] = []
        self._unfinished: dict[int, CommunicationEvent] = {}
        self._originals: list[tuple[Any, str, Any]] = []
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to note; does nothing where torch.distributed isn't built in."""
        if not torch.distributed.is_available():
            return
        group_type = torch.distributed.ProcessGroup
        for op, methods in _OPS.items():
            for method in set(methods) & set(vars(group_type)):
                self._replace(group_type, method, self._noting(op, getattr(group_type, method)))
        self._replace(torch.distributed.Work, "wait", self._ending(torch.distributed.Work.wait))

    def stop(self) -> None:
        """Put torch.distributed back as it was. What is still under way counts as ending now."""
        for owner, name, original in reversed(self._originals):
            setattr(owner, name, original)
        self._originals.clear()
        for key in list(self._unfinished):
            self._finish(key)

    def events(self, trace: Mapping[str, Any]) -> list[CommunicationEvent]:
        """All communication, by start: the calls noted, and what only the profiler's ``trace`` has seen."""
        kernels = list(_gpu_events(trace))
        if kernels:
            found = kernels + [event for event in self._events if not event.on_gpu]
        else:
            found = list(_functional_events(trace)) + self._events
        return sorted(found, key=lambda event: event.start_ns)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._originals.append((owner, name, vars(owner)[name]))  # getattr would lose the binding to an instance
        setattr(owner, name, value)

    def _noting(self, op: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            sides = [list(_tensors(side)) for side in (*args, *kwargs.values())]
            event = CommunicationEvent(
                op=op,
                num_bytes=max((sum(t.numel() * t.element_size() for t in side) for side in sides), default=0),
                group=group.group_name,
                group_size=group.size(),
                start_ns=time.time_ns(),
                duration_ns=0,
                on_gpu=any(t.is_cuda for side in sides for t in side),
            )
            self._events.append(event)
            work = None
            try:
                work = original(group, *args, **kwargs)
            finally:
                self._follow(event, work)
            return work

        return call

    def _ending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(work, *args, **kwargs)
            finally:
                self._finish(id(work))

        return wait

    def _follow(self, event: CommunicationEvent, work: Any) -> None:
        """Have ``event`` end when ``work`` is done or waited for, whichever is seen first."""
        key = id(event if work is None else work)
        self._finish(key)  # an earlier work that nobody waited for, at the same address
        with self._lock:
            self._unfinished[key] = event
        if work is None or event.on_gpu:
            self._finish(key)
            return
        with suppress(RuntimeError):  # sends and receives have no future: their wait ends them
            work.get_future().add_done_callback(lambda _: self._finish(key, event))

    def _finish(self, key: int, expected: CommunicationEvent | None = None) -> None:
        with self._lock:
            event = self._unfinished.get(key)
            if event is not None and expected in (None, event):
                del self._unfinished[key]
                event.duration_ns = time.time_ns() - event.start_ns


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _gpu_events(trace: Mapping[str, Any]) -> Iterable[CommunicationEvent]:
    """The NCCL kernels of a trace, which carry their collective's name, sizes and group. A barrier's call says more."""
    for event in trace["traceEvents"]:
        args = event.get("args") or {}
        if event.get("cat") == "kernel" and args.get("Collective name", "barrier") != "barrier":
            size = _ITEM_BYTES.get(str(args.get("dtype", "")).lower())
            nelems = max(int(args.get("In msg nelems", 0)), int(args.get("Out msg nelems", 0)))
            name = str(args["Collective name"]).lstrip("_")
            ops = [op for op, methods in _OPS.items() if name.startswith((op, *(m.lstrip("_") for m in methods)))]
            yield CommunicationEvent(
                op=max(ops, key=len, default=name),
                num_bytes=None if size is None else size * nelems,
                group=args.get("Process Group Name"),
                group_size=args.get("Group size"),
                start_ns=_start_ns(trace, event),
                duration_ns=round(event["dur"] * 1000),
                on_gpu=True,
            )


def _functional_events(trace: Mapping[str, Any]) -> list[CommunicationEvent]:
    """Functional collectives on the CPU: each ends with the first wait of its thread that no earlier one has taken."""
    spans = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e["name"].startswith(_FUNCTIONAL_PREFIX)]
    events: list[CommunicationEvent] = []
    under_way: dict[Any, list[CommunicationEvent]] = {}
    for span in sorted(spans, key=lambda e: float(e["ts"])):
        name = span["name"].removeprefix(_FUNCTIONAL_PREFIX)
        queue = under_way.setdefault(span["tid"], [])
        if name in _FUNCTIONAL:
            events.append(_functional_event(_FUNCTIONAL[name], trace, span))
            queue.append(events[-1])
        elif name == "wait_tensor" and queue:
            event = queue.pop(0)
            event.duration_ns = _start_ns(trace, span) + round(span["dur"] * 1000) - event.start_ns
    return events


def _functional_event(op: str, trace: Mapping[str, Any], span: Mapping[str, Any]) -> CommunicationEvent:
    args = span["args"]
    size = _ITEM_BYTES.get(str(next(iter(args.get("Input type", [])), "")).lower())
    num_bytes = None if size is None else size * prod(args["Input Dims"][0])
    group_size = int(args["Concrete Inputs"][1]) if op == "all_gather" and num_bytes is not None else None
    return CommunicationEvent(
        op=op,
        num_bytes=num_bytes if num_bytes is None or group_size is None else num_bytes * group_size,
        group=None,
        group_size=group_size,
        start_ns=_start_ns(trace, span),
        duration_ns=round(span["dur"] * 1000),
    )


def _start_ns(trace: Mapping[str, Any], event: Mapping[str, Any]) -> int:
    return int(trace["baseTimeNanoseconds"]) + round(float(event["ts"]) * 1000)
