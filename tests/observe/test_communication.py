from __future__ import annotations

from typing import Any

import pytest
import torch

from verl.observe.communication import CommunicationRecorder


def kernel(name: str, ts: float, nelems: tuple[int, int], dtype: str = "Float") -> dict[str, Any]:
    """A kernel's event as torch writes it for NCCL."""
    args = {
        "Collective name": name,
        "In msg nelems": nelems[0],
        "Out msg nelems": nelems[1],
        "Group size": 2,
        "dtype": dtype,
        "Process Group Name": "7",
    }
    return {"ph": "X", "cat": "kernel", "name": "ncclDevKernel", "pid": 0, "tid": 7, "ts": ts, "dur": 4.5, "args": args}


@pytest.mark.parametrize(
    ("name", "nelems", "dtype", "op", "num_bytes"),
    [
        ("allreduce", (1000, 1000), "Float", "all_reduce", 4000),
        ("_allgather_base", (1000, 2000), "Float", "all_gather", 8000),
        ("all_gather_single", (1000, 2000), "BFloat16", "all_gather", 4000),
        ("_reduce_scatter_base", (1000, 500), "Half", "reduce_scatter", 2000),
        ("reduce_scatter_tensor_coalesced", (10, 5), "Byte", "reduce_scatter", 10),
        ("reduce", (10, 10), "Double", "reduce", 80),
        ("all_to_allv", (10, 20), "Long", "all_to_all", 160),
        ("send", (10, 10), "Float8_e4m3fn", "send", None),
        ("something_new", (10, 10), "Int", "something_new", 40),
    ],
)
def test_kernels_of_nccl(name: str, nelems: tuple[int, int], dtype: str, op: str, num_bytes: int | None) -> None:
    trace = {"baseTimeNanoseconds": 1000, "traceEvents": [kernel(name, 2.5, nelems, dtype), {"ph": "M", "name": "x"}]}
    (event,) = CommunicationRecorder().events(trace)
    assert (event.op, event.num_bytes, event.group, event.group_size) == (op, num_bytes, "7", 2)
    assert (event.start_ns, event.duration_ns, event.on_gpu) == (3500, 4500, True)
    shown = event.trace_event(1000, 42)
    assert (shown["ts"], shown["dur"], shown["pid"]) == (2.5, 4.5, 42)
    assert shown["args"] == {"op": op, "bytes": num_bytes, "group": "7", "group_size": 2, "duration_us": 4.5}


def test_events_come_by_start_and_a_barriers_kernel_is_left_to_its_call() -> None:
    names = [("broadcast", 9.0), ("barrier", 5.0), ("allreduce", 1.0)]
    trace = {"baseTimeNanoseconds": 0, "traceEvents": [kernel(name, ts, (1, 1)) for name, ts in names]}
    assert [event.op for event in CommunicationRecorder().events(trace)] == ["all_reduce", "broadcast"]


def test_stop_puts_torch_back_as_it_was() -> None:
    group, work = torch.distributed.ProcessGroup, torch.distributed.Work
    before = dict(vars(group)), dict(vars(work))
    recorder = CommunicationRecorder()
    recorder.start()
    changed = {name for name, value in vars(group).items() if before[0][name] is not value}
    assert {"allreduce", "allgather", "broadcast", "send", "recv", "barrier"} <= changed
    recorder.stop()
    assert (dict(vars(group)), dict(vars(work))) == before
