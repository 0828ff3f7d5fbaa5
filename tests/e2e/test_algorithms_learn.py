"""Each algorithm raises the reward of whole runs: from random weights, to one digit whatever is asked."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from tests.trainer.runs import sections
from verl.algorithms import ALGORITHMS
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.sections import OnPolicyRun

WANTED = "7"
STEPS = 20


def sevens(response: str) -> float:
    """Share of the response that is the wanted digit; nothing of an empty one."""
    return response.count(WANTED) / len(response) if response else 0.0


def rewards_of(folder: Path, algorithm: dict[str, object], lr: float = 0.02) -> list[float]:
    """Mean reward of each step. Two updates a step, so that ratios leave 1."""
    made = sections(
        folder,
        algorithm=algorithm,
        reward__function=f"{Path(__file__)}:sevens",
        rollout__max_response_tokens=3,
        actor={"optim": {"lr": lr}, "mini_batches_per_epoch": 2},
        critic={"optim": {"lr": lr}},
        trainer__prompts_per_step=4,
        trainer__group_size=8,
        trainer__total_steps=STEPS,
        trainer__save_rollouts_every=None,
    )
    trainer = PPOTrainer.from_config(OnPolicyRun.parse(made))
    trainer.run()
    trainer.close()
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["reward/score/mean"] for line in lines]


@pytest.mark.parametrize("name", sorted(name for name in ALGORITHMS if ALGORITHMS.load(name).family == "on_policy"))
def test_the_reward_rises(name: str, tmp_path: Path) -> None:
    rewards = rewards_of(tmp_path, {"name": name})
    assert mean(rewards[:2]) < 0.35, "there is something to learn"
    assert mean(rewards[-5:]) > 0.7


def test_without_learning_it_would_not_rise(tmp_path: Path) -> None:
    rewards = rewards_of(tmp_path, {"name": "grpo"}, lr=1e-9)
    assert mean(rewards[-5:]) < 0.35
