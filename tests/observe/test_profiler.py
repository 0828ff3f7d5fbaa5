from __future__ import annotations

import gzip
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from verl.common.errors import VerlError
from verl.observe.profiler import ProfileConfig, StepProfiler, VerlProfiler


def work() -> None:
    weight = torch.ones(8, 8, requires_grad=True)
    (weight @ weight).sum().backward()


def run_steps(folder: Path, rank: int = 0, world_size: int = 1, total: int = 4, **options: Any) -> None:
    profiler = StepProfiler(ProfileConfig(**options), folder, rank, total, world_size)
    for number in range(1, total + 1):
        with profiler.step(number):
            work()


def events_of(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} isn't JSON")

    events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    return events


def test_without_a_gpu_nothing_overlaps(tmp_path: Path) -> None:
    profiler = VerlProfiler(output_dir=tmp_path)
    with profiler:
        work()
    assert profiler.overlap is None and "gpu" not in json.loads((tmp_path / "verl_trace.json").read_text())


@pytest.mark.parametrize("with_stacks", [False, True])
@pytest.mark.parametrize("record_memory", [False, True])
@pytest.mark.parametrize("ranks", [None, [0], [1], [0, 1]])
def test_one_trace_per_selected_rank_and_step(
    tmp_path: Path, with_stacks: bool, record_memory: bool, ranks: list[int] | None
) -> None:
    traces = tmp_path / "run" / "traces"
    record = ["stacks"] * with_stacks + ["memory"] * record_memory
    for rank in (0, 1):
        run_steps(traces, rank, 2, steps=[2], ranks=ranks, record=record)
    expected = [f"step_000002.rank{rank}.json" for rank in ranks or [0, 1]]
    assert sorted(path.name for path in traces.iterdir()) == expected
    for name in expected:
        events = events_of(traces / name)
        names = {event.get("name") for event in events}
        assert "step 2" in names and "step 3" not in names
        assert ("[memory]" in names) is record_memory
        assert any(event.get("cat") == "python_function" for event in events) is with_stacks


def test_several_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_steps(tmp_path, steps=[1, 3, 4, 3])
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_00000{n}.rank0.json" for n in (1, 3, 4)]
    assert caplog.text == ""


def test_off_makes_no_folder_and_no_profiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def touched(*_: object, **__: object) -> None:
        raise AssertionError("profiling is off")

    monkeypatch.setattr(torch.profiler, "profile", touched)
    run_steps(tmp_path / "traces")
    run_steps(tmp_path / "traces", rank=0, world_size=2, steps=[2], ranks=[1])
    assert list(tmp_path.iterdir()) == [] and caplog.text == ""


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ({"steps": [99]}, r"profile.steps [99] match no step of the run, which has 1 to 4"),
        ({"steps": [0, 2]}, r"profile.steps [0] match no step"),
        ({"steps": [2], "ranks": [5]}, r"profile.ranks [5] match no rank of the run, which has 0 to 1"),
        ({"steps": [2], "ranks": []}, r"profile.ranks is empty"),
        ({"ranks": [0]}, r"profile.ranks is set, but profile.steps is empty"),
        ({"record": ["stacks"]}, r"profile.record is set, but profile.steps is empty"),
    ],
)
def test_a_selection_without_effect_is_a_warning_from_rank_0(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], warning: str
) -> None:
    with caplog.at_level(logging.WARNING):
        StepProfiler(ProfileConfig(**options), tmp_path, 1, 4, 2)
        assert caplog.text == ""
        StepProfiler(ProfileConfig(**options), tmp_path, 0, 4, 2)
    assert warning in caplog.text and len(caplog.records) == 1


def test_a_step_that_raises_leaves_its_trace_and_its_error(tmp_path: Path) -> None:
    profiler = StepProfiler(ProfileConfig(steps=[1, 2]), tmp_path, 0, 2)
    with pytest.raises(KeyError, match="in the step"), profiler.step(1):
        work()
        raise KeyError("in the step")
    events_of(tmp_path / "step_000001.rank0.json")
    with profiler.step(2):
        work()
    events_of(tmp_path / "step_000002.rank0.json")


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "traces").write_text("a file where the folder should be")
    run_steps(tmp_path / "traces", steps=[2])
    assert "step_000002.rank0.json could not be written" in caplog.text


def test_other_threads_are_traced(tmp_path: Path) -> None:
    def generate() -> None:
        with torch.profiler.record_function("generate beside"):
            work()

    profiler = StepProfiler(ProfileConfig(steps=[1]), tmp_path, 0, 1)
    with profiler.step(1):
        work()
        thread = threading.Thread(target=generate)
        thread.start()
        thread.join()
    assert "generate beside" in {event.get("name") for event in events_of(tmp_path / "step_000001.rank0.json")}


def test_names_that_need_escaping(tmp_path: Path) -> None:
    profiler = StepProfiler(ProfileConfig(steps=[1]), tmp_path, 0, 1)
    with profiler.step(1), torch.profiler.record_function('a "quoted" \\ name\nwith\ttabs, é'):
        work()
    events_of(tmp_path / "step_000001.rank0.json")


def test_verl_profiler_as_the_documentation_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    profiler = VerlProfiler(record_memory=True, record_communication=True, output_dir="./profile_logs")
    profiler.start()
    work()
    profiler.stop()
    assert list(tmp_path.iterdir()) == []
    assert profiler.export_chrome_trace("verl_trace.json") == Path("profile_logs/verl_trace.json")
    assert [path.name for path in Path("profile_logs").iterdir()] == ["verl_trace.json"]
    assert "[memory]" in {event.get("name") for event in events_of(Path("profile_logs/verl_trace.json"))}
    assert profiler.communication == []


def test_exports_again_anywhere_and_gzipped(tmp_path: Path) -> None:
    profiler = VerlProfiler(output_dir=tmp_path / "logs", record_memory=False)
    profiler.start()
    work()
    profiler.stop()
    absolute = profiler.export_chrome_trace(tmp_path / "elsewhere" / "a.json")
    assert absolute == tmp_path / "elsewhere" / "a.json" and not (tmp_path / "logs").exists()
    zipped = profiler.export_chrome_trace("deep/b.json.gz")
    assert zipped == tmp_path / "logs" / "deep" / "b.json.gz"
    assert json.loads(gzip.decompress(zipped.read_bytes())) == json.loads(absolute.read_text())


def test_wrong_order_is_named(tmp_path: Path) -> None:
    profiler = VerlProfiler(output_dir=tmp_path)
    with pytest.raises(VerlError, match="nothing was recorded"):
        profiler.export_chrome_trace("a.json")
    with pytest.raises(VerlError, match=r"stop\(\) was called without start\(\)"):
        profiler.stop()
    profiler.start()
    try:
        with pytest.raises(VerlError, match="called twice"):
            profiler.start()
        with pytest.raises(VerlError, match=r"stop\(\) was not called yet"):
            profiler.export_chrome_trace("a.json")
        with pytest.raises(VerlError, match="another profiler is running"):
            VerlProfiler(output_dir=tmp_path).start()
    finally:
        profiler.stop()
    with pytest.raises(VerlError, match="without start"):
        profiler.stop()
    assert list(tmp_path.iterdir()) == []


def test_under_another_profiler_the_step_runs_untraced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outer = VerlProfiler(output_dir=tmp_path / "outer")
    with outer:
        run_steps(tmp_path / "traces", steps=[2])
    assert "step 2 is not traced: another profiler" in caplog.text and not (tmp_path / "traces").exists()
    assert "aten::mm" in {event.get("name") for event in events_of(tmp_path / "outer" / "verl_trace.json")}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), pytest.raises(VerlError):
        VerlProfiler(output_dir=tmp_path).start()


def test_starts_again_after_stop(tmp_path: Path) -> None:
    profiler = VerlProfiler(output_dir=tmp_path, record_memory=False)
    for name in ("first", "second"):
        profiler.start()
        with torch.profiler.record_function(name):
            work()
        profiler.stop()
    names = {event.get("name") for event in events_of(profiler.export_chrome_trace("a.json"))}
    assert "second" in names and "first" not in names


def test_with_block_exports_even_when_it_raises(tmp_path: Path) -> None:
    with pytest.raises(KeyError), VerlProfiler(output_dir=tmp_path):
        work()
        raise KeyError
    events_of(tmp_path / "verl_trace.json")


def test_a_program_that_dies_before_stop_leaves_its_trace(tmp_path: Path) -> None:
    program = (
        "import torch\nfrom verl.utils.profiler import VerlProfiler\n"
        f"VerlProfiler(output_dir={str(tmp_path)!r}).start()\n"
        "torch.ones(4, 4) @ torch.ones(4, 4)\nraise KeyError('in training')\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 1 and "in training" in ended.stderr and "was never stopped" in ended.stderr
    events_of(tmp_path / "verl_trace.json")


def _two_ranks(rank: int, folder: str) -> tuple[list[tuple[Any, ...]], str, float]:
    import time
    import warnings

    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    from torch.distributed import all_reduce

    warnings.simplefilter("ignore")
    pair = dist.new_group([0, 1])
    original = dist.ProcessGroup.allreduce
    profiler = VerlProfiler(output_dir=folder)
    profiler.start()
    work()
    tensor = torch.ones(1000)
    at_the_call = Path(folder) / "rank0_is_there"
    if rank == 0:
        at_the_call.touch()
    else:
        while not at_the_call.exists():
            time.sleep(0.01)
        time.sleep(0.3)
    all_reduce(tensor, group=pair)
    dist.all_gather([torch.empty(1000), torch.empty(1000)], tensor)
    dist.broadcast(tensor.to(torch.bfloat16), 0)
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    dist.all_reduce(tensor, async_op=True).wait()
    functional.all_reduce(tensor[:10], "sum", dist.group.WORLD).sum()
    functional.all_gather_tensor(tensor[:10], 0, dist.group.WORLD).sum()
    dist.barrier()
    profiler.stop()
    dist.all_reduce(tensor)
    assert dist.ProcessGroup.allreduce is original
    events = [(e.op, e.num_bytes, e.group, e.group_size) for e in profiler.communication]
    assert all(0 < e.duration_ns < 20e9 for e in profiler.communication)
    path = profiler.export_chrome_trace("verl_trace.json")
    return events, path.name, profiler.communication[0].duration_ns / 1e9


def test_communication_of_two_ranks(tmp_path: Path) -> None:
    (left, left_name, waited), (right, right_name, _) = run_ranks(2, _two_ranks, str(tmp_path))
    pair = left[0][2]
    assert left[:6] == [
        ("all_reduce", 4000, pair, 2),
        ("all_gather", 8000, "0", 2),
        ("broadcast", 2000, "0", 2),
        ("send", 4000, "0", 2),
        ("all_reduce", 4000, "0", 2),
        ("all_reduce", 40, None, None),
    ]
    assert pair != "0" and left[6][:2] == ("all_gather", 80) and left[7] == ("barrier", 0, "0", 2)
    assert right == [*left[:3], ("recv", 4000, "0", 2), *left[4:]]
    assert waited > 0.15  # rank 0 waited for rank 1
    assert (left_name, right_name) == ("verl_trace.json", "verl_trace.rank1.json")
    for name in (left_name, right_name):
        events = [event for event in events_of(tmp_path / name) if event.get("cat") == "communication"]
        assert [event["name"] for event in events][:2] == ["all_reduce", "all_gather"]
        assert events[0]["args"]["bytes"] == 4000 and events[0]["args"]["group"] == pair
        spans = [e["ts"] for e in events_of(tmp_path / name) if e.get("ph") == "X" and "aten" in e["name"]]
        assert min(spans) < events[0]["ts"] < max(spans)  # on the clock of the rest of the trace
