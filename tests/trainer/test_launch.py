from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.tiny import tiny_folder
from tests.trainer.runs import (
    REWARDS,
    checkpoints_of,
    config_file,
    environment,
    metrics_of,
    prompts,
    sections,
    verl,
    write_jsonl,
)
from verl.cli import app
from verl.common.errors import ConfigError, RewardError
from verl.config import load_config
from verl.trainer.launch import plan, train_run
from verl.trainer.placement import PlacementConfig
from verl.trainer.sections import OnPolicyRun
from verl.workers import recipe


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"trainer__total_steps": 7}, 7),
        ({"trainer__total_steps": None}, 4),
        ({"trainer__total_steps": None, "trainer__epochs": 3}, 12),
        ({"trainer__total_steps": None, "rows": 5}, 3),
        ({"trainer__total_steps": None, "trainer__epochs": 3, "rows": 5}, 8),
    ],
)
def test_a_plan_counts_the_steps_that_the_run_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], steps: int
) -> None:
    run = OnPolicyRun.parse(sections(tmp_path, **changes))  # type: ignore[arg-type]
    assert f"# steps: {steps} of 2 prompts × 4 responses" in plan(run)
    from verl.trainer.ppo_trainer import PPOTrainer

    trainer = PPOTrainer.from_config(run)
    trainer.close()
    assert trainer.last_step == trainer.total_steps == steps


@pytest.mark.parametrize(("bound", "steps", "words"), [(3, None, "at most 4"), (1, None, "4"), (3, 7, "7")])
def test_a_plan_of_epochs_is_a_bound_where_a_step_draws_several_batches(
    tmp_path: Path, bound: int, steps: int | None, words: str
) -> None:
    algorithm = {"name": "dapo", "max_generations": bound}
    run = OnPolicyRun.parse(sections(tmp_path, algorithm=algorithm, trainer__total_steps=steps))
    assert f"# steps: {words} of 2 prompts" in plan(run)


def test_a_plan_reads_as_the_config_and_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "load_model", None)
    val = write_jsonl(tmp_path / "val.jsonl", prompts(3))
    run = OnPolicyRun.parse(sections(tmp_path, data__val=str(val)))
    text = plan(run)
    assert OnPolicyRun.parse(OmegaConf.to_container(OmegaConf.create(text))) == run  # type: ignore[arg-type]
    assert "# train: read 8 rows, kept 8" in text and "# val: read 3 rows, kept 3" in text
    assert not (tmp_path / "run").exists()


def test_a_plan_finds_what_would_stop_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the model has 32"):
        plan(OnPolicyRun.parse(sections(tmp_path, rollout__max_response_tokens=30)))
    with pytest.raises(ConfigError, match="one reward"):
        plan(OnPolicyRun.parse(sections(tmp_path, reward={"timeout_s": 3})))


def test_a_run_prints_its_summary_and_keeps_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import logging

    logging.getLogger("verl").setLevel(logging.INFO)
    assert train_run(OnPolicyRun.parse(sections(tmp_path))) == 0
    assert "mean reward" in capsys.readouterr().out
    log = (tmp_path / "run" / "logs" / "run.log").read_text()
    assert "sampling with SamplingParams" in log
    assert train_run(OnPolicyRun.parse(sections(tmp_path))) == 0
    again = (tmp_path / "run" / "logs" / "run.log").read_text()
    assert again.startswith(log) and "the run is finished, 2 of 2 steps" in again
    assert not [h for h in logging.getLogger("verl").handlers if isinstance(h, logging.FileHandler)]


def test_a_refused_start_leaves_no_folder_that_nobody_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keys = sections(tmp_path, rollout__max_response_tokens=30)
    named = keys["trainer"].pop("output_dir")
    with pytest.raises(ConfigError, match="the model has 32"):
        train_run(OnPolicyRun.parse(keys))
    assert list((tmp_path / "runs").iterdir()) == []
    keys["trainer"]["output_dir"] = named
    with pytest.raises(ConfigError, match="the model has 32"):
        train_run(OnPolicyRun.parse(keys))
    assert "ERROR verl.trainer.launch: the longest prompt" in (tmp_path / "run" / "logs" / "run.log").read_text()


def test_what_ends_a_run_is_in_its_log_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = OnPolicyRun.parse(sections(tmp_path, reward={"function": f"{REWARDS}:boom"}))
    with pytest.raises(RewardError, match="failed on all"):
        train_run(run)
    log = (tmp_path / "run" / "logs" / "run.log").read_text()
    assert log.count("failed on all") == 1 and "failed on all" not in caplog.text


def torchrun(*words: str, ranks: int = 2) -> subprocess.Popen[str]:
    """``torchrun`` as users start it, its output in one pipe."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return subprocess.Popen(
        [*launch, *words], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize("devices", [1, 2])
def test_a_model_folder_that_does_not_load_is_one_line_wherever_it_is_read(tmp_path: Path, devices: int) -> None:
    path = tiny_folder(tmp_path / "model") / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if name != "lm_head.weight"}
    save_file(kept, path, metadata={"format": "pt"})
    file = config_file(tmp_path, model={"path": str(path.parent)}, placement__devices=devices)
    done = verl("train", str(file))
    assert done.returncode == 1 and "Traceback" not in done.stderr and "worker, rank 0: was ended" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: model.path='{path.parent}' doesn't load") and "lack lm_head.weight" in last
    assert last.endswith(")") is (devices > 1)


SCRIPT = """
import logging, os, sys
from omegaconf import OmegaConf
from verl.trainer.ppo_trainer import PPOTrainer
logging.basicConfig(level=logging.INFO)
print("before", os.environ["RANK"], flush=True)
trainer = PPOTrainer(**OmegaConf.load(sys.argv[1]))
print("after", os.environ["RANK"], trainer.run(num_steps=2).exit_code, flush=True)
trainer.close()
"""


def test_a_script_under_torchrun_goes_on_at_rank_0_alone(tmp_path: Path) -> None:
    """And makes the steps that it makes without; what rank 0 says no other rank repeats."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    config = config_file(tmp_path, profile__record=["stacks"])
    run = torchrun(str(script), str(config))
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    assert {line for line in output.splitlines() if line.startswith("before")} == {"before 0", "before 1"}
    assert [line for line in output.splitlines() if line.startswith("after")] == ["after 0 0"]
    assert output.count("key without effect: profile.record") == output.count("sampling with") == 1
    under = metrics_of(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "under")
    assert train_run(load_config(config)) == 0
    for one, many in zip(metrics_of(tmp_path / "run"), under, strict=True):
        assert one.keys() == many.keys()
        assert many == pytest.approx(one, rel=1e-4, abs=1e-6)


def test_a_signal_to_torchrun_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    config = config_file(tmp_path, trainer__total_steps=10_000, trainer__epochs=None)
    run = torchrun("-m", "verl", "train", str(config), "track.trackers=[console]")
    assert run.stdout is not None
    with run.stdout as output:
        seen = next((line for line in output if line.startswith("step 3/")), "no step was made")
        run.send_signal(signal.SIGTERM)
        rest = output.read()
    assert run.wait(60) != 0 and seen.startswith("step 3/"), rest
    (saved,) = checkpoints_of(tmp_path / "run")
    assert len(metrics_of(tmp_path / "run")) == int(saved.removeprefix("step_")) >= 3
    assert "SIGTERM: stopping after step" in rest


def test_other_ranks_of_torchrun_print_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []
    for rank in ("0", "1"):
        for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": rank}.items():
            monkeypatch.setenv(name, value)
        result = CliRunner().invoke(app, ["train", str(config_file(tmp_path)), "--dry-run"])
        assert result.exit_code == 0
        outputs.append(result.output)
    assert "# steps: 2 of 2 prompts" in outputs[0] and outputs[1] == ""


def test_what_torchrun_starts_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    auto = PlacementConfig()
    assert (auto.kind, auto.num_devices, auto.idle_ranks) == ("torchrun", 4, [])
    assert PlacementConfig(devices=2, rollout=[3]).idle_ranks == [2]
    with pytest.raises(ConfigError, match=r"placement.executor=processes would leave 3 of the 4 processes of torchrun"):
        OnPolicyRun.parse(sections(tmp_path, placement={"executor": "processes", "devices": 2}))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert (auto.kind, auto.num_devices) == ("inprocess", 1)
