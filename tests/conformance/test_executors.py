"""Every executor does the same: rules, order, rows, handles, errors; and none leaves anything behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conformance.executor_cases import FATAL, GENERAL, SEVERAL, run_case

ROOT = Path(__file__).resolve().parent.parent.parent
WORLD_SIZE = 3
NO_OTHER_WORKER = {"a_worker_that_is_killed", "a_worker_that_raises_while_others_wait_for_it"}

pytestmark = pytest.mark.timeout(120)
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray isn't installed")


def environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No shared memory with a name is there afterwards that wasn't before; tests beside may have theirs for a while."""
    before = shared_memory()
    yield
    limit = time.monotonic() + 20
    while (left := shared_memory() - before) and time.monotonic() < limit:
        time.sleep(0.1)
    assert left == set()


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


@pytest.mark.parametrize("name", [*GENERAL, *(name for name in FATAL if name not in NO_OTHER_WORKER)])
def test_in_this_process(name: str) -> None:
    run_case("inprocess", name, 1)


@pytest.mark.parametrize("name", [*GENERAL, *SEVERAL, *FATAL])
def test_on_processes(name: str) -> None:
    before = psutil.Process().children(recursive=True)
    run_case("processes", name, WORLD_SIZE)
    assert [child for child in psutil.Process().children(recursive=True) if child not in before] == []


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import warnings

    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
        yield
        ray.shutdown()


@needs_ray
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*GENERAL, *SEVERAL, *FATAL])
def test_on_ray(name: str, cluster: None) -> None:
    run_case("ray", name, 2)


def torchrun(size: int, folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={size}", "-m"]
    command = [sys.executable, *launch, "tests.conformance.executor_cases", "torchrun", str(folder), *names]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """One launch for all cases that leave every process alive."""
    folder = tmp_path_factory.mktemp("torchrun")
    return folder, torchrun(WORLD_SIZE, folder, *GENERAL, *SEVERAL)


@pytest.mark.parametrize("name", [*GENERAL, *SEVERAL])
def test_under_torchrun(name: str, under_torchrun: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = under_torchrun
    assert (folder / name).is_file(), done.stderr
    assert (folder / name).read_text(encoding="utf-8") == ""
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", FATAL)
def test_that_ends_a_run_under_torchrun(name: str, tmp_path: Path) -> None:
    done = torchrun(2, tmp_path, name)
    if name == "a_worker_that_is_killed":  # torchrun ends the other ranks at once; what happened is said before
        assert done.returncode and "trouble worker, rank 1: is gone" in done.stderr
        return
    assert (tmp_path / name).is_file(), done.stderr
    assert (tmp_path / name).read_text(encoding="utf-8") == ""


PROGRAM = """
import os, sys, time
from tests.controller.roles import Echo
from verl.controller import ResourcePool, run

def program(controller):
    echo = controller.group("echo", Echo, ResourcePool(2, kind="cpu"))
    for pid, _ in echo.seen().get(60):
        print(pid, flush=True)
    rows = echo.add(list(range(100_000)))
    rows.wait(60)
    echo.sleep(600)
    time.sleep(600)

run(program, sys.argv[1], **({"cpus_per_worker": 0.25} if sys.argv[1] == "ray" else {}))
"""


@pytest.mark.parametrize(
    "executor", ["processes", "torchrun", "torchrun's agent", pytest.param("ray", marks=needs_ray)]
)
def test_no_worker_outlives_a_controller_that_is_killed(executor: str, tmp_path: Path) -> None:
    executor, is_agent_killed = executor.removesuffix("'s agent"), executor.endswith("agent")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"] if executor == "torchrun" else []
    run = subprocess.Popen(
        [sys.executable, *launch, str(script), executor],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=environment(),
    )  # fmt: skip
    assert run.stdout is not None
    try:
        pids = [int(run.stdout.readline()) for _ in range(2)]
        assert all(psutil.pid_exists(pid) for pid in pids)
        time.sleep(0.5)  # the rows have been made and the sleep begun
        os.kill(pids[0] if executor == "torchrun" and not is_agent_killed else run.pid, signal.SIGKILL)
        run.wait(60)
        assert ended(pids, 30.0)
    finally:
        run.kill()
        run.wait()
        run.stdout.close()


def ended(pids: list[int], limit_s: float) -> bool:
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return True
        time.sleep(0.05)
    return False


MEETING = """
import sys, torch
from tests.controller.roles import Tensors
from verl.controller import Controller, ResourcePool

with Controller("processes") as controller:
    group = controller.group("sums", Tensors, ResourcePool(2, kind="cpu"), meet=True)
    print(group.all_sum(torch.full((2,), float(sys.argv[1]))).get(60))
"""


def test_runs_at_once_meet_on_ports_of_their_own() -> None:
    """H22: the customary port is taken, and two runs start together; each sums its own numbers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0) if port_is_held(29500) else ("127.0.0.1", 29500))
        taken.listen()
        runs: list[Any] = [
            subprocess.Popen(
                [sys.executable, "-c", MEETING, number], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment()
            )
            for number in ("1", "10")
        ]
        outputs = [run.communicate(timeout=100)[0].strip() for run in runs]
    assert outputs == ["[2.0, 2.0]", "[20.0, 20.0]"] and [run.returncode for run in runs] == [0, 0]


def port_is_held(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
