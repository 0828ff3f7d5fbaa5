"""What saving beside the loop may not change: the files, the curve, what is left after any death, what is told."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import checkpoints_of, config_file, environment, metrics_of, rollouts_of, sections
from verl.common.errors import CheckpointError
from verl.engines import snapshot
from verl.trainer.checkpoint import CheckpointStore
from verl.trainer.interrupts import Interrupted
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.sections import OnPolicyRun

EVERY_STEP = {"trainer__save_every": 1, "trainer__keep_checkpoints": None, "trainer__total_steps": 3}
PPO = {"algorithm": "ppo", "critic__optim__lr": 0.02}
NEVER_ALIKE = {".metadata", "manifest.json", "state.json"}
"""Ids of a save, their hashes, and the config with the key itself and the run's folder."""


def trainer_of(folder: Path, **changes: Any) -> PPOTrainer:
    folder.mkdir(exist_ok=True)
    return PPOTrainer.from_config(OnPolicyRun.parse(sections(folder, **{**EVERY_STEP, **changes})))


def run(folder: Path, **changes: Any) -> Path:
    trainer = trainer_of(folder, **changes)
    try:
        trainer.run()
    finally:
        trainer.close()
    return folder / "run"


def files_of(run_folder: Path) -> dict[str, bytes]:
    root = run_folder / "checkpoints"
    found = (p for p in root.rglob("*") if p.is_file() and p.name not in {*NEVER_ALIKE, ".lock"})
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in found}


def put_before_model_writing(monkeypatch: pytest.MonkeyPatch, before: Callable[[], object]) -> None:
    plain = snapshot.save_weights

    def changed(*args: Any) -> None:
        before()
        plain(*args)

    monkeypatch.setattr(snapshot, "save_weights", changed)


@pytest.mark.parametrize("places", [{}, {"placement__devices": 2}], ids=["one process", "two workers"])
def test_the_files_are_those_of_a_run_that_waits(tmp_path: Path, places: dict[str, Any]) -> None:
    beside = files_of(run(tmp_path / "beside", **PPO, **places))
    waiting = files_of(run(tmp_path / "waiting", **PPO, **places, trainer__async_save=False))
    assert {name.partition("/")[0] for name in waiting} == {"step_000001", "step_000002", "step_000003", "latest"}
    assert sorted(beside) == sorted(waiting)
    assert [name for name in waiting if beside[name] != waiting[name]] == []


def test_the_loop_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    put_before_model_writing(monkeypatch, lambda: gate.wait(60))
    trainer = trainer_of(tmp_path, trainer__save_every=2)
    for _ in range(3):
        trainer.step()
    assert checkpoints_of(tmp_path / "run") == []
    gate.set()
    trainer.close()
    assert checkpoints_of(tmp_path / "run") == ["step_000002", "step_000003"]
    straight = files_of(run(tmp_path / "straight", trainer__async_save=False))
    late = files_of(tmp_path / "run")
    assert [name for name in late if late[name] != straight[name]] == []


def test_a_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, most = [0], [0]

    def slowly() -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.3)
        inside[0] -= 1

    put_before_model_writing(monkeypatch, slowly)
    assert checkpoints_of(run(tmp_path)) == ["step_000001", "step_000002", "step_000003"]
    assert most == [1]


def fail_once(kind: int) -> Callable[[], None]:
    left = [1]

    def fail() -> None:
        if left:
            left.pop()
            raise OSError(kind, "the disk is no more")

    return fail


def test_a_lost_checkpoint_ends_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put_before_model_writing(monkeypatch, fail_once(errno.EIO))
    trainer = trainer_of(tmp_path)
    trainer.step()
    while not caplog.text:  # told at once, whatever the loop does
        time.sleep(0.01)
    with pytest.raises(CheckpointError, match=r"checkpoint of step 1 can't be written in .*the disk is no more"):
        trainer.step()
    trainer.close()
    assert checkpoints_of(tmp_path / "run") == ["step_000002"]
    assert not list((tmp_path / "run" / "checkpoints").glob(".*.tmp"))
    assert trainer_of(tmp_path).steps_done == 2


def test_a_lost_last_checkpoint_ends_the_run_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_before_model_writing(monkeypatch, fail_once(errno.ENOSPC))
    with pytest.raises(CheckpointError, match="no room for the checkpoint of step 3"):
        run(tmp_path, trainer__save_every=3)
    assert checkpoints_of(tmp_path / "run") == []


def test_a_machine_without_memory_for_copies_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("verl.trainer.resume.available_bytes", lambda: 0)
    put_before_model_writing(monkeypatch, lambda: time.sleep(0.2))
    trainer = trainer_of(tmp_path)
    trainer.step()
    assert checkpoints_of(tmp_path / "run") == ["step_000001"]
    assert "trainer.async_save needs" in caplog.text
    trainer.close()


SLOW = """
import sys, time, pathlib
from verl.engines import snapshot
plain = snapshot.save_weights
_, file, mark, seconds = sys.argv
def slowly(folder, *args):
    plain(folder, *args)
    pathlib.Path(mark).touch()
    time.sleep(float(seconds))
snapshot.save_weights = slowly
sys.argv = ['verl', 'train', file]
from verl.cli import main
main()
"""


def start_slow(folder: Path, seconds: float, **changes: Any) -> subprocess.Popen[str]:
    """A run in a process, in the middle of writing its first checkpoint when this returns."""
    file, mark = config_file(folder, **{**EVERY_STEP, **changes}), folder / "mark"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(file), str(mark), str(seconds)], env=environment(), text=True,
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    while not mark.exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    return process


def test_a_kill_while_writing_leaves_no_half_checkpoint_and_the_curve_goes_on(tmp_path: Path) -> None:
    process = start_slow(tmp_path, 60)
    process.kill()
    process.communicate()
    assert checkpoints_of(tmp_path / "run") == [] and CheckpointStore(tmp_path / "run").latest() is None
    run(tmp_path)
    straight = run(tmp_path / "straight")
    assert metrics_of(tmp_path / "run") == metrics_of(straight)
    assert rollouts_of(tmp_path / "run") == rollouts_of(straight)
    assert not list((tmp_path / "run" / "checkpoints").glob(".*.tmp"))


def test_sigterm_waits_for_what_is_being_written(tmp_path: Path) -> None:
    process = start_slow(tmp_path, 2, trainer__save_every=2, trainer__total_steps=1000)
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGTERM, errors
    saved = checkpoints_of(tmp_path / "run")
    assert saved[0] == "step_000002" and saved[-1] == f"step_{metrics_of(tmp_path / 'run')[-1]['step']:06d}"


def test_a_signal_in_the_loop_is_told_beside_a_pending_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``step`` outside ``run`` raises what came; ``close`` waits for the save."""
    put_before_model_writing(monkeypatch, lambda: time.sleep(0.5))
    trainer = trainer_of(tmp_path)
    with pytest.raises(Interrupted), trainer.interrupts.listening():
        trainer.step()
        signal.raise_signal(signal.SIGTERM)
    trainer.close()
    assert checkpoints_of(tmp_path / "run") == ["step_000001"]
