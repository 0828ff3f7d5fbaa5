"""What becomes of a run whose workers, or whose own process, die, hang, raise or are told to stop."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.batches import sampled_batch
from tests.trainer.runs import checkpoints_of, config_file, environment, metrics_of, sections
from verl.common.errors import CheckpointError, WorkerError
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.sections import OnPolicyRun

SHARED_MEMORY = Path("/dev/shm")
TWO = {"placement__executor": "processes", "placement__devices": 2}
LONG = {
    "rollout": {"max_response_tokens": 1000, "ignore_eos": True},
    "model__scratch__max_position_embeddings": 1100,
    "data__max_prompt_tokens": 8,
}


@dataclass
class Run:
    """``verl train`` over two workers, in a process of its own that writes to files."""

    folder: Path
    process: subprocess.Popen[bytes]
    workers: list[psutil.Process] = field(default_factory=list)

    def wait_for_step(self, step: int) -> None:
        """Until that step is in metrics.jsonl; by then all workers are there."""
        until = time.monotonic() + 120
        while (
            not (path := self.folder / "run" / "metrics.jsonl").is_file() or len(path.read_text().split("\n")) <= step
        ):
            assert self.process.poll() is None and time.monotonic() < until, self.words()
            time.sleep(0.02)
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.workers = [child for child in children if "verl.controller" in " ".join(child.cmdline())]
        assert len(self.workers) == 2

    def wait_for_checkpoint(self) -> None:
        """Until there is one: they are written beside the loop."""
        until = time.monotonic() + 60
        while not checkpoints_of(self.folder / "run"):
            assert self.process.poll() is None and time.monotonic() < until, self.words()
            time.sleep(0.02)

    def ends(self, within_s: float) -> int:
        """Its exit code; nothing that it started is left a moment later."""
        code = self.process.wait(timeout=within_s)
        _, left = psutil.wait_procs(self.workers, timeout=10)
        assert left == []
        return code

    def words(self) -> str:
        return (self.folder / "stderr").read_text()


@pytest.fixture
def start(tmp_path: Path) -> Any:
    before = shared_memory()
    started: list[Run] = []

    def begin(**changes: Any) -> Run:
        changes = {"trainer__total_steps": 300, "trainer__save_every": 1, **TWO, **changes}
        file = config_file(tmp_path, **changes)
        with (tmp_path / "stderr").open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "verl", "train", str(file)], env=environment(), stderr=errors,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
        started.append(Run(tmp_path, process))
        return started[-1]

    yield begin
    for run in started:
        run.process.kill()
        run.process.wait()
    deadline = time.monotonic() + 20  # what another program makes meanwhile goes by itself
    while (left := shared_memory() - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


def shared_memory() -> set[str]:
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def assert_goes_on(folder: Path, **changes: Any) -> None:
    """In one process, from the newest checkpoint, with the curve of a run that nothing happened to."""
    newest = int(checkpoints_of(folder / "run")[-1].removeprefix("step_"))
    straight = folder / "straight"
    straight.mkdir()
    for place in (folder, straight):
        trainer = PPOTrainer.from_config(OnPolicyRun.parse(sections(place, trainer__total_steps=300, **changes)))
        assert trainer.steps_done == (newest if place == folder else 0)
        trainer.run(newest + 2)
        trainer.close()
    for one, other in zip(metrics_of(straight / "run"), metrics_of(folder / "run"), strict=True):
        assert one == pytest.approx(other, rel=2e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("act", "changes", "words"),
    [
        (lambda run: run.workers[1].kill(), {}, r"(?s)\w+ worker, rank 1: died of SIGKILL; .*\(during \w+\)"),
        (
            lambda run: run.workers[0].suspend(),
            {"placement__call_timeout_s": 4.0},
            r"\w+ worker, rank 0: gave no answer within 4 s and was ended",
        ),
    ],
    ids=["killed", "hung"],
)
def test_a_run_ends_with_its_worker_and_goes_on_from_its_checkpoint(
    start: Any, act: Callable[[Run], None], changes: dict[str, Any], words: str
) -> None:
    run = start(**changes)
    run.wait_for_step(2)
    run.wait_for_checkpoint()
    act(run)
    assert run.ends(within_s=30) == 1
    assert re.search(words, run.words()), run.words()
    assert_goes_on(run.folder)


def test_workers_end_with_a_killed_run_and_it_goes_on(start: Any) -> None:
    run = start()
    run.wait_for_step(2)
    run.wait_for_checkpoint()
    run.process.kill()
    assert run.ends(within_s=10) == -signal.SIGKILL
    assert_goes_on(run.folder)


@pytest.mark.parametrize("changes", [LONG, {"actor__epochs_per_step": 100}], ids=["generation", "update"])
def test_a_run_that_is_told_to_stop_saves_its_last_whole_step(start: Any, changes: dict[str, Any]) -> None:
    """Nearly all of the time goes into the one phase, so that is where the signal arrives."""
    run = start(trainer__save_every=None, **changes)
    run.wait_for_step(1)
    time.sleep(0.3)
    run.process.send_signal(signal.SIGTERM)
    assert run.ends(within_s=60) == 128 + signal.SIGTERM
    assert "SIGTERM: stopping after step" in run.words() and "Traceback" not in run.words()
    steps = [line["step"] for line in metrics_of(run.folder / "run")]
    assert checkpoints_of(run.folder / "run") == [f"step_{steps[-1]:06d}"]


def test_a_rank_that_cannot_write_or_that_others_wait_for(tmp_path: Path) -> None:
    """A checkpoint that one rank can't write is removed when all have ended, and the run can go on. One that raises in
    a forward pass, where the others gather weights that it doesn't send, ends it; nothing more is saved of it."""
    adaptive = {"algorithm": {"name": "ppo", "kl_coef": 0.2, "kl_target": 0.05}}
    made = sections(tmp_path, trainer__total_steps=300, trainer__save_every=None, **adaptive, **TWO)
    trainer = PPOTrainer.from_config(OnPolicyRun.parse(made))
    (pid,) = (p.pid for p in psutil.Process().children() if p.environ().get("RANK") == "1")
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE, (9000, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError, match="no room for the checkpoint of step 1"):
        trainer.run(num_steps=1)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [".lock"]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    trainer.run(num_steps=1)
    unknown_to_rank_1 = sampled_batch([3, 2], [2, 2])
    for ids in ("prompt_ids", "response_ids"):
        unknown_to_rank_1[ids].remainder_(9)
    unknown_to_rank_1["prompt_ids"][-1] = 1000
    infer = trainer.parts.passes[0].infer
    trainer.parts.passes[0].infer = lambda batch: infer(unknown_to_rank_1)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"(?s)actor worker, rank 1: infer raised.*IndexError"):
        trainer.run(num_steps=1)
    trainer.close()
    assert time.monotonic() - start < 30
    assert checkpoints_of(tmp_path / "run") == ["step_000002"]
    assert_goes_on(tmp_path, **adaptive)
