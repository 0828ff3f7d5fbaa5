from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import checkpoints_of, config_file, environment, metrics_of, rollouts_of, sections
from verl.trainer.interrupts import Interrupted, Interrupts
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.sections import OnPolicyRun

LONG = {"model__scratch__max_position_embeddings": 4096, "actor__optim__lr": 0.0}


def test_a_signal_ends_a_block_at_once_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    interrupts = Interrupts()
    with pytest.raises(Interrupted) as caught, interrupts.listening():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.exit_code == 143 and str(caught.value) == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_protected_block_is_finished_first() -> None:
    interrupts, seen = Interrupts(), []
    with pytest.raises(Interrupted), interrupts.listening():
        with interrupts.protected():
            signal.raise_signal(signal.SIGINT)
            seen.append("finished")
        seen.append("never")
    assert seen == ["finished"]


def test_an_allowed_part_of_a_protected_block_is_ended() -> None:
    interrupts, seen = Interrupts(), []
    with pytest.raises(Interrupted), interrupts.listening(), interrupts.protected():
        signal.raise_signal(signal.SIGINT)
        seen.append("held")
        with interrupts.allowed():
            seen.append("never")
    assert seen == ["held"]


def test_the_last_block_swallows_a_first_signal() -> None:
    interrupts = Interrupts()
    with interrupts.listening(), interrupts.ignored():
        signal.raise_signal(signal.SIGINT)


def test_another_thread_than_the_main_one_listens_to_nothing() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def body() -> None:
        with Interrupts().listening():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [before]


class Raises:
    """A callback that sends this process a signal after step 2."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_start(self, trainer: PPOTrainer) -> None:
        pass

    def on_step(self, trainer: PPOTrainer, batch: Any, metrics: Any) -> None:
        if trainer.steps_done == 2:
            signal.raise_signal(self.number)

    def on_end(self, trainer: PPOTrainer) -> None:
        pass


def interrupted(folder: Path, patch: Any, **changes: Any) -> tuple[int, PPOTrainer]:
    changes = {"trainer__total_steps": 5, **changes}
    trainer = PPOTrainer.from_config(OnPolicyRun.parse(sections(folder, **changes)))
    patch(trainer)
    code = trainer.run().exit_code
    trainer.close()
    return code, trainer


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("phase", ["generate", "score", "infer", "advantages", "update", "callback"])
def test_a_signal_in_each_phase_leaves_a_whole_step(tmp_path: Path, phase: str, number: int) -> None:
    """Before the update the step is thrown away, from then on it is finished; either way the curve goes on."""
    changes = {"algorithm": {"name": "ppo", "kl_coef": 0.1, "kl_target": 0.01, "kl_horizon": 20}}
    steps = {"generate": 1, "score": 1, "infer": 1, "advantages": 2, "update": 2, "callback": 2}[phase]

    def patch(trainer: PPOTrainer) -> None:
        parts = trainer.parts
        owner: Any = {
            "generate": parts.rollout.engine, "score": parts.rewards, "infer": parts.roles.actor,
            "advantages": parts.algorithm, "update": parts.roles.actor, "callback": None,
        }[phase]  # fmt: skip
        if owner is None:
            trainer.callbacks.insert(0, Raises(number))
            return
        plain = getattr(owner, phase)

        def raising(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            if trainer.steps_done == 1:
                setattr(owner, phase, plain)  # what is saved is inferred from once more
                signal.raise_signal(number)
            return result

        setattr(owner, phase, raising)

    code, trainer = interrupted(tmp_path, patch, **changes)
    assert (code, trainer.steps_done) == (128 + number, steps)
    run = tmp_path / "run"
    assert checkpoints_of(run) == [f"step_{steps:06d}"]
    assert [line["step"] for line in metrics_of(run)] == list(range(1, steps + 1))
    assert len(rollouts_of(run)) == steps
    assert interrupted(tmp_path, lambda trainer: None, **changes)[1].steps_done == 5
    straight = tmp_path / "straight"
    straight.mkdir()
    interrupted(straight, lambda trainer: None, **changes)
    assert metrics_of(run) == metrics_of(straight / "run")


def start(file: Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "verl", "train", str(file)], env={**environment(), **variables},
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, preexec_fn=_listen_to_ctrl_c,
    )  # fmt: skip


def _listen_to_ctrl_c() -> None:
    """A shell has what it starts in the background ignore Ctrl-C, and that is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for(process: subprocess.Popen[str], path: Path, pattern: str) -> None:
    limit = time.monotonic() + 60
    while not list(path.glob(pattern)):
        assert process.poll() is None and time.monotonic() < limit, process.communicate()[1]
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "changes"),
    [
        (signal.SIGINT, {"rollout": {"max_response_tokens": 1500, "ignore_eos": True}, **LONG}),
        (signal.SIGTERM, {"actor__epochs_per_step": 100}),
    ],
    ids=["generation", "update"],
)
def test_the_command_stops_with_a_checkpoint_and_goes_on(tmp_path: Path, number: int, changes: dict[str, Any]) -> None:
    """Nearly all of the time goes into the one phase, so that is where the signal arrives."""
    file = config_file(tmp_path, trainer__total_steps=500, **changes)
    process = start(file)
    wait_for(process, tmp_path / "run" / "rollouts", "step_000001.jsonl")
    time.sleep(0.2)
    process.send_signal(number)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number, errors
    assert signal.Signals(number).name in errors and "Traceback" not in errors
    steps = [line["step"] for line in metrics_of(tmp_path / "run")]
    assert checkpoints_of(tmp_path / "run") == [f"step_{steps[-1]:06d}"]
    trainer = PPOTrainer.from_config(OnPolicyRun.parse(sections(tmp_path, trainer__total_steps=500, **changes)))
    assert trainer.steps_done == steps[-1]
    trainer.close()


def test_a_signal_within_a_reward_and_a_second_one(tmp_path: Path) -> None:
    """The first ends the scoring though its worker is stuck; one that arrives while that is saved ends the process."""
    (tmp_path / "stuck.py").write_text(
        "import os, time\n\n\ndef score(response):\n    open(os.environ['MARK'], 'w').close()\n    time.sleep(100)\n"
    )
    file = config_file(tmp_path, reward={"function": f"{tmp_path}/stuck.py:score", "workers": 1, "timeout_s": 200})
    process = start(file, MARK=str(tmp_path / "mark"))
    wait_for(process, tmp_path, "mark")
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and time.monotonic() - started < 10, errors
    assert "SIGINT: stopping after step 0 of 2" in errors and "Traceback" not in errors


def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\nfrom verl.trainer.interrupts import Interrupts\ninterrupts = Interrupts()\n"
        "with interrupts.listening(), interrupts.protected():\n"
        f"    open({str(tmp_path / 'ready')!r}, 'w').close()\n"
        "    try:\n        time.sleep(60)\n    finally:\n        time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env=environment(), text=True, stderr=subprocess.PIPE)
    wait_for(process, tmp_path, "ready")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=5)
    assert process.returncode == -signal.SIGINT


def test_a_signal_while_the_run_is_being_set_up(tmp_path: Path) -> None:
    (tmp_path / "slow_start.py").write_text(
        f"import time\nopen({str(tmp_path / 'mark')!r}, 'w').close()\ntime.sleep(50)\n"
        "def score(response):\n    return 1\n"
    )
    process = start(config_file(tmp_path, reward={"function": f"{tmp_path}/slow_start.py:score", "workers": 1}))
    wait_for(process, tmp_path, "mark")
    os.kill(process.pid, signal.SIGINT)
    errors = process.communicate(timeout=20)[1]
    assert process.returncode == 130 and "Traceback" not in errors, errors
