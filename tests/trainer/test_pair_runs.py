"""Whole runs of reward models and online DPO: alone and on workers, stopped and resumed, and one scoring the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.trainer.runs import SCRATCH, metrics_of
from tests.trainer.runs import sections as on_policy
from verl.config import load_config
from verl.trainer.launch import train_run
from verl.trainer.preference_trainer import PreferenceTrainer
from verl.trainer.reward_model import RewardModel

PAIRS = [{"prompt": f"{i}+1=", "chosen": f"{2 * (i % 5)}" * (1 + i % 3), "rejected": f"{i % 9}1"} for i in range(10)]
WORKERS = {"executor": "processes", "devices": 2}


def judge(folder: Path, **sections: Any) -> PreferenceTrainer:
    return PreferenceTrainer(
        {"scratch": dict(SCRATCH), "tokenizer": "chars:0123456789+="},
        {"train": PAIRS, "max_example_tokens": 12},
        algorithm="bradley_terry",
        actor={"optim": {"lr": 0.01}, "mini_batches_per_epoch": 2},
        trainer={"output_dir": folder / "run", "rows_per_step": 5, "total_steps": 4, "device": "cpu"},
        track={"trackers": []},
        **sections,
    )


def test_a_reward_model_learns_is_saved_and_goes_on(tmp_path: Path) -> None:
    straight = judge(tmp_path / "straight")
    straight.run()
    straight.close()
    first = judge(tmp_path / "parts")
    first.run(2)
    first.close()
    second = judge(tmp_path / "parts")
    assert second.steps_done == 2
    second.run()
    second.close()
    lines = metrics_of(tmp_path / "straight" / "run")
    assert metrics_of(tmp_path / "parts" / "run") == lines
    assert lines[-1]["reward_model/loss"] < 0.693 and lines[-1]["reward_model/margin"] > 0
    folder = tmp_path / "straight" / "run" / "checkpoints" / "step_000004" / "reward_model" / "model"
    model = RewardModel(folder, device="cpu")
    assert len({round(score, 4) for score in model.score(["1+1=2", "1+1=31", "7+1=44"])}) == 3


def run_with(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    path = folder / "config.yaml"
    folder.mkdir()
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(on_policy(folder, **changes))), encoding="utf-8")
    assert train_run(load_config(path)) == 0
    return metrics_of(folder / "run")


def test_a_reward_model_on_workers_makes_the_steps_of_one_process(tmp_path: Path) -> None:
    here = judge(tmp_path / "here")
    here.run()
    here.close()
    there = judge(tmp_path / "there", placement=WORKERS)
    there.run()
    there.close()
    for one, two in zip(metrics_of(tmp_path / "here" / "run"), metrics_of(tmp_path / "there" / "run"), strict=True):
        for key in ("reward_model/loss", "reward_model/margin", "reward_model/grad_norm"):
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key


def test_online_dpo_on_workers_makes_the_steps_of_one_process(tmp_path: Path) -> None:
    changes = {"algorithm": {"name": "online_dpo", "max_generations": 2}, "actor__mini_batches_per_epoch": 2}
    one, two = run_with(tmp_path / "one", **changes), run_with(tmp_path / "two", placement=WORKERS, **changes)
    assert one[0]["algorithm/pairs"] >= 1
    for here, there in zip(one, two, strict=True):
        for key in ("actor/loss", "actor/margin", "algorithm/pairs", "algorithm/score_gap/mean", "reward/score/mean"):
            assert there[key] == pytest.approx(here[key], rel=1e-3, abs=1e-4), key


def test_a_trained_reward_model_scores_an_online_run_here_and_on_a_worker_of_its_own(tmp_path: Path) -> None:
    made = judge(tmp_path / "judge")
    made.run()
    made.close()
    folder = tmp_path / "judge" / "run" / "checkpoints" / "step_000004" / "reward_model" / "model"
    keys: dict[str, Any] = {"algorithm": {"name": "online_dpo"}, "reward": {"model": str(folder)}}
    lines = run_with(tmp_path / "run", **keys)
    apart = run_with(tmp_path / "apart", **keys, placement={"executor": "processes", "devices": 1, "reward": 1})
    for name in ("mean", "std", "max", "min"):
        key = f"reward/score/{name}"
        assert [line[key] for line in apart] == pytest.approx([line[key] for line in lines], rel=1e-3, abs=1e-4)
    assert lines[0]["reward/score/std"] > 0 and lines[0]["reward/error_count"] == 0
    assert lines[0]["algorithm/pairs"] == 2, "no two scores of a network are equal"
