from __future__ import annotations

import logging
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import (
    REWARDS,
    checkpoints_of,
    config_file,
    environment,
    metrics_of,
    rollouts_of,
    sections,
)
from verl.common.errors import CheckpointError, ConfigError
from verl.common.section import key_paths
from verl.engines.config import EngineConfig, TrainedConfig
from verl.rollout import ROLLOUT_ENGINES
from verl.trainer import resume
from verl.trainer.ppo_trainer import PPOTrainer, RunResult
from verl.trainer.sections import OnPolicyRun

PPO = {
    "algorithm": {"name": "ppo", "kl_coef": 0.2, "kl_target": 0.05, "kl_horizon": 40},
    "actor__mini_batches_per_epoch": 2,
    "critic__mini_batches_per_epoch": 2,
    "critic__optim__lr": 0.02,
    "actor__optim__schedule": "cosine",
    "actor__optim__warmup_steps": 2,
}

REMAX = {"algorithm": {"name": "remax", "kl_coef": 0.1, "kl_target": 0.05}, "trainer__group_size": 1}
DAPO = {"algorithm": {"name": "dapo", "max_generations": 3}, "reward__function": f"{REWARDS}:unequal_on_odd_rows"}


def run(folder: Path, num_steps: int | None = None, **changes: Any) -> RunResult:
    folder.mkdir(exist_ok=True)
    trainer = PPOTrainer.from_config(OnPolicyRun.parse(sections(folder, **changes)))
    try:
        return trainer.run(num_steps)
    finally:
        trainer.close()


def assert_same_run(straight: Path, parts: Path) -> None:
    assert metrics_of(parts / "run") == metrics_of(straight / "run")
    assert rollouts_of(parts / "run") == rollouts_of(straight / "run")


@pytest.mark.parametrize(
    "algorithm",
    [{"algorithm": {"name": "grpo", "kl_coef": 0.05}}, PPO, REMAX, DAPO],
    ids=["grpo", "ppo", "remax", "dapo"],
)
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_resumed_run_makes_the_same_curve(tmp_path: Path, algorithm: dict[str, Any], stop: int) -> None:
    changes = {**algorithm, "trainer__total_steps": 6}
    run(tmp_path / "straight", **changes)
    assert run(tmp_path / "parts", stop, **changes).steps == stop
    assert run(tmp_path / "parts", **changes).steps == 6
    assert [line["step"] for line in metrics_of(tmp_path / "parts" / "run")] == [1, 2, 3, 4, 5, 6]
    assert_same_run(tmp_path / "straight", tmp_path / "parts")


def test_the_curve_of_ppo_moves(tmp_path: Path) -> None:
    """The comparison above would hold for a run in which nothing happens."""
    run(tmp_path, **PPO, trainer__total_steps=6)
    lines = metrics_of(tmp_path / "run")
    assert len({line["actor/kl_coef"] for line in lines}) > 1
    assert len({line["actor/lr"] for line in lines}) > 3
    assert len({line["critic/value_loss"] for line in lines}) == 6
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    assert [rows[0]["policy_version"] for rows in rollouts_of(tmp_path / "run").values()] == [0, 1, 2, 3, 4, 5]


def test_two_run_calls_equal_one(tmp_path: Path) -> None:
    run(tmp_path / "straight", trainer__total_steps=4)
    (tmp_path / "parts").mkdir()
    trainer = PPOTrainer.from_config(OnPolicyRun.parse(sections(tmp_path / "parts", trainer__total_steps=4)))
    assert trainer.run(num_steps=1).steps == 1
    assert trainer.run(num_steps=3).steps == 4
    trainer.close()
    assert_same_run(tmp_path / "straight", tmp_path / "parts")


@pytest.mark.parametrize("stop", [3, 4, 8])
def test_position_at_the_end_of_an_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture, stop: int) -> None:
    """8 rows, 2 a step, 2 epochs: 8 steps, and each row once in each epoch wherever the run was stopped."""
    changes = {"trainer__total_steps": None, "trainer__epochs": 2, "trainer__save_every": 4}
    assert run(tmp_path, stop, **changes).steps == stop
    with caplog.at_level(logging.INFO, "verl"):
        result = run(tmp_path, **changes)
    assert (result.steps, result.exit_code) == (8, 0)
    assert ("the run is finished, 8 of 8 steps" in caplog.text) is (stop == 8)
    seen = [{row["row_id"] for row in rows} for rows in rollouts_of(tmp_path / "run").values()]
    assert [len(rows) for rows in seen] == [2] * 8
    assert set.union(*seen[:4]) == set.union(*seen[4:]) == set(range(8))
    assert checkpoints_of(tmp_path / "run") == ["step_000004", "step_000008"]


def test_a_seed_decides_the_run(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(tmp_path / name, trainer__seed=seed)
    assert rollouts_of(tmp_path / "a" / "run") == rollouts_of(tmp_path / "b" / "run")
    assert rollouts_of(tmp_path / "a" / "run") != rollouts_of(tmp_path / "c" / "run")


def test_resume_never_refuses_a_run_and_takes_an_empty_folder(tmp_path: Path) -> None:
    run(tmp_path, trainer__resume="never")
    with pytest.raises(ConfigError, match=r"trainer\.output_dir=.*holds a run.*trainer\.resume"):
        run(tmp_path, trainer__resume="never")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"algorithm": {"name": "ppo"}}, "algorithm.name was 'grpo', is 'ppo'"),
        ({"model__scratch__hidden_size": 32}, "model.scratch.hidden_size was 16, is 32"),
        ({"model__tokenizer": "chars:+=9876543210"}, "model.tokenizer was"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, change: dict[str, Any], key: str) -> None:
    run(tmp_path)
    with pytest.raises(ConfigError, match="belongs to another run") as caught:
        run(tmp_path, **change)
    assert key in str(caught.value) and "trainer.output_dir" in str(caught.value)


def test_keys_that_change_the_curve_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path)
    run(tmp_path, trainer__total_steps=3, actor__optim__lr=0.5, trainer__group_size=2)
    text = " ".join(r.getMessage() for r in caplog.records if "not the same curve" in r.getMessage())
    assert "actor.optim.lr was 0.01, is 0.5" in text and "trainer.group_size was 4, is 2" in text
    assert "trainer.total_steps" not in text


HOW = {
    "actor__max_tokens_per_micro_batch": 64,
    "actor__offload_optimizer": True,
    "actor__gradient_checkpointing": True,
    "actor__reshard_after_forward": False,
    "reference__max_tokens_per_micro_batch": 64,
    "critic__gradient_checkpointing": True,
    "rollout__block_size": 4,
    "rollout__cache_tokens": 256,
    "rollout__memory_frac": 0.5,
    "rollout__max_running_rows": 3,
    "rollout__max_prefill_tokens": 16,
    "rollout__prefix_cache": False,
    "rollout__use_cuda_graph": False,
    "reward__workers": 1,
    "reward__cache": True,
    "validation__every": 1,
}


def test_keys_of_memory_and_speed_are_no_other_curve(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path / "straight", trainer__total_steps=2)
    run(tmp_path / "parts", 1, trainer__total_steps=2)
    run(tmp_path / "parts", trainer__total_steps=2, **HOW)
    assert "not the same curve" not in caplog.text
    straight, parts = (rollouts_of(tmp_path / name / "run")["step_000002.jsonl"] for name in ("straight", "parts"))
    assert [row["response"] for row in parts] == [row["response"] for row in straight]


def test_every_key_of_how_a_role_runs_is_known_as_one() -> None:
    """Whatever is added to these sections has to be decided on."""
    learnt = {"epochs_per_step", "mini_batches_per_epoch", "name", "temperature", "max_response_tokens", "stop"}
    learnt |= {"stop_token_ids", "ignore_eos"}
    native = ROLLOUT_ENGINES.load("native").Config
    for section, kind in {"actor": TrainedConfig, "reference": EngineConfig, "rollout": native}.items():
        keys = [key for key in key_paths(kind) if not key.startswith("optim") and key not in {*learnt, "parallel"}]
        for key in keys:
            assert resume._HOW.fullmatch(f"{section}.{key}"), key


def test_other_rows_than_before_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path)
    run(tmp_path, rows=9, trainer__total_steps=3)
    assert "data.train holds other rows" in caplog.text


def test_a_run_whose_checkpoints_are_all_damaged_is_left_as_it_is(tmp_path: Path) -> None:
    run(tmp_path, 2, trainer__total_steps=4, trainer__save_every=1)
    for manifest in (tmp_path / "run" / "checkpoints").glob("step_*/manifest.json"):
        manifest.write_text("")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=r"none of the 2 .*step_000002 .*manifest.*trainer\.output_dir"):
        run(tmp_path, trainer__total_steps=4, trainer__save_every=1)
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert after == before and checkpoints_of(tmp_path / "run") == ["step_000001", "step_000002"]


def test_nothing_is_saved_of_a_step_that_broke_within_its_update(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The critic has learnt and the actor hasn't: a checkpoint of that would be of no step."""
    made = sections(tmp_path, **PPO, trainer__total_steps=4)
    trainer = PPOTrainer.from_config(OnPolicyRun.parse(made))
    trainer.run(num_steps=1)
    trainer.parts.roles.actor.loss = lambda outputs, columns: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        trainer.run(num_steps=1)
    trainer.close()
    assert "step 2 broke off within an update" in caplog.text
    assert checkpoints_of(tmp_path / "run") == ["step_000001"]
    run(tmp_path, **PPO, trainer__total_steps=4)
    run_straight = tmp_path / "straight"
    run(run_straight, **PPO, trainer__total_steps=4)
    assert_same_run(run_straight, tmp_path)


@pytest.mark.slow
def test_resume_after_a_kill_at_any_moment(tmp_path: Path) -> None:
    changes = {"trainer__total_steps": 40, "trainer__save_every": 3, "algorithm": {"name": "grpo", "kl_coef": 0.05}}
    run_folder = tmp_path / "killed"
    run_folder.mkdir()
    file = config_file(run_folder, **changes)
    process = subprocess.Popen(
        [sys.executable, "-m", "verl", "train", str(file)], env=environment(), stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    while process.poll() is None and not list(run_folder.glob("run/rollouts/*")):
        time.sleep(0.01)
    time.sleep(random.random() * 0.2)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    run(run_folder, **changes)
    run(tmp_path / "straight", **changes)
    assert_same_run(tmp_path / "straight", run_folder)


def test_a_full_disk_ends_the_run_and_keeps_older_checkpoints(tmp_path: Path) -> None:
    file = config_file(tmp_path, trainer__total_steps=4, trainer__save_every=1)
    run(tmp_path, 1, trainer__total_steps=4, trainer__save_every=1)
    before = {p: p.read_bytes() for p in (tmp_path / "run" / "checkpoints").rglob("*") if p.is_file()}
    limited = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (12000, 12000)); "
        "sys.argv = ['verl', 'train', sys.argv[1]]; from verl.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited, str(file)], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "no room for the checkpoint of step 2" in done.stderr  # said when it happens, before step 3's ends the run
    assert "Traceback" not in done.stderr
    assert {p: p.read_bytes() for p in before} == before
    assert run(tmp_path, trainer__total_steps=4, trainer__save_every=1).steps == 4


@pytest.mark.parametrize(("keys", "step"), [({}, 4), ({"trainer__save_every": 3}, 3), ({"algorithm": "ppo"}, 4)])
def test_a_disk_too_small_for_any_checkpoint_is_found_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], step: int
) -> None:
    trainer = PPOTrainer.from_config(OnPolicyRun.parse(sections(tmp_path, trainer__total_steps=4, **keys)))
    sizes = [p.numel() for role in trainer.parts.trained for p in role.engine.network.module.parameters()]
    needed = 12 * sum(sizes)  # float32 weights and two moments
    monkeypatch.setattr("verl.common.files.free_bytes", lambda folder: needed - 1)
    with pytest.raises(CheckpointError, match=rf"checkpoint of step {step} .* needs at least {needed:,} bytes"):
        trainer.run()
    assert trainer.steps_done == 0 and not list((tmp_path / "run").glob("checkpoints/step_*"))
    monkeypatch.undo()
    assert trainer.run().steps == 4
    trainer.close()


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    engine = PPOTrainer.from_config(OnPolicyRun.parse(sections(tmp_path))).parts.roles.actor.engine
    with pytest.raises(CheckpointError, match=r"no tensor of shape \[\d+, 16\] for 'model.embed_tokens.weight'"):
        engine.set_weights({})


@pytest.mark.parametrize("kind", ["a file", "below a file"])
def test_an_output_folder_that_cannot_be_written(tmp_path: Path, kind: str) -> None:
    (tmp_path / "taken").write_text("")
    folder = tmp_path / "taken" if kind == "a file" else tmp_path / "taken" / "run"
    with pytest.raises(ConfigError, match=r"trainer\.output_dir=.* can't be written"):
        run(tmp_path, trainer__output_dir=str(folder))
