import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.runs import ROOT, metrics_of, sections
from verl.common.errors import ConfigError
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.run_claim import RunClaim
from verl.trainer.sections import OnPolicyRun

OTHER = """
import sys, time
from pathlib import Path
from verl.trainer.run_claim import RunClaim

claim = RunClaim(Path(sys.argv[1]))
claim.take()
print("held", flush=True)
time.sleep(100)
"""


def other_holder(folder: Path) -> subprocess.Popen[str]:
    """Another process that holds ``folder``."""
    command = [sys.executable, "-c", OTHER, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    other = other_holder(tmp_path)
    claim = RunClaim(tmp_path / "link")
    try:
        with pytest.raises(ConfigError, match=rf"trainer\.output_dir.* in use by another run, process {other.pid}:"):
            claim.take()
    finally:
        end(other)
    claim.take()


def test_what_is_released_or_forgotten_is_free(tmp_path: Path) -> None:
    claim = RunClaim(tmp_path)
    claim.take()
    claim.release()
    end(other_holder(tmp_path))
    claim.take()
    del claim
    end(other_holder(tmp_path))


def test_a_newer_claim_of_the_process_takes_over(tmp_path: Path) -> None:
    first, second = RunClaim(tmp_path), RunClaim(tmp_path)
    first.take()
    second.take()
    first.release()  # what it no longer holds
    probe = subprocess.run(
        [sys.executable, "-c", OTHER, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert f"process {os.getpid()}:" in probe.stderr
    second.release()
    end(other_holder(tmp_path))


def test_a_trainer_holds_its_folder_while_it_is_at_work(tmp_path: Path) -> None:
    config = OnPolicyRun.parse(sections(tmp_path))
    (tmp_path / "run").mkdir()
    other = other_holder(tmp_path / "run")
    try:
        with pytest.raises(ConfigError, match="in use by another run"):
            PPOTrainer.from_config(config)
    finally:
        end(other)
    trainer = PPOTrainer.from_config(config)
    trainer.run(1)
    other = other_holder(tmp_path / "run")  # between two calls of run it is free
    try:
        with pytest.raises(ConfigError, match="in use by another run"):
            trainer.run(1)
    finally:
        end(other)
    trainer.run()
    trainer.close()
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [1, 2]
