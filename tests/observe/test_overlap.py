from __future__ import annotations

from typing import Any

import pytest

from verl.observe.overlap import overlap_of


def kernel(name: str, start: float, end: float) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": start, "dur": end - start}


def test_time_is_shared_out_by_what_runs() -> None:
    events = [
        kernel("gemm", 10, 30), kernel("gemm", 20, 40),  # two streams: 30 us of compute
        kernel("ncclDevKernel_AllGather_RING_LL", 35, 45), kernel("ncclDevKernel_ReduceScatter", 44, 50),
        kernel("norm", 60, 70),
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 100}, {"ph": "M", "name": "process_name"},
    ]  # fmt: skip
    found = overlap_of({"traceEvents": events})
    assert found is not None
    assert found.span_s == pytest.approx(60e-6)
    assert found.compute_s == pytest.approx(40e-6)
    assert found.communication_s == pytest.approx(15e-6)
    assert found.hidden_s == pytest.approx(5e-6)
    assert found.idle_s == pytest.approx(10e-6)
    assert found.hidden_frac == pytest.approx(1 / 3)


def test_nothing_to_hide_is_hidden() -> None:
    found = overlap_of({"traceEvents": [kernel("gemm", 0, 1)]})
    assert found is not None and found.hidden_frac == 1 and found.communication_s == found.idle_s == 0


def test_without_a_gpu_there_is_none() -> None:
    assert overlap_of({"traceEvents": [{"cat": "cpu_op", "name": "nccl", "ts": 0, "dur": 1}]}) is None
