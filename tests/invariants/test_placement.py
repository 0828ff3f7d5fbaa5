"""What a run may not depend on: how many processes its roles are spread over, and how they share a model there.

Every leg of a run goes on, from the checkpoint of the one before, under another placement; all legs together are
compared with one process that went straight through: metrics, samples and weights. A leg costs seconds for its
workers to start, so each covers as much as it can.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM

from tests.trainer.runs import (
    REWARDS,
    SCRATCH,
    checkpoints_of,
    config_file,
    environment,
    metrics_of,
    prompts,
    rollouts_of,
    sections,
    verl,
    write_jsonl,
)
from verl.observe.keys import VALIDATION
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.sections import OnPolicyRun

TWO = {"placement": {"executor": "processes", "devices": 2}}
ONE: dict[str, Any] = {}
APART = {"placement": {"devices": 2, "critic": 1, "reference": 1, "rollout": 1}}


def split(**sizes: int) -> dict[str, Any]:
    """Two devices, and every role's model over both of them."""
    return {**TWO, **{f"{role}__parallel": sizes for role in ("actor", "critic", "reference")}}


DP2 = TWO
TP2 = split(tensor_parallel_size=2)
PP2 = split(pipeline_parallel_size=2)
SP2 = split(sequence_parallel_size=2)

TIED = {"model__scratch": {**SCRATCH, "num_key_value_heads": 2, "tie_word_embeddings": True}}
PPO = {
    **TIED,
    "algorithm": {"name": "ppo", "kl_coef": 0.2, "kl_target": 0.05, "kl_horizon": 40},
    "actor__mini_batches_per_epoch": 3,
    "critic__epochs_per_step": 2,
    "critic__optim__lr": 0.02,
    "actor__optim__schedule": "cosine",
    "actor__optim__warmup_steps": 2,
}
KL_IN_LOSS = {
    **TIED,
    "algorithm": {"name": "ppo", "kl_coef": 0.2, "kl_in": "loss"},
    "actor__max_tokens_per_micro_batch": 16,
    "critic__max_tokens_per_micro_batch": 16,
}
GRPO = {"algorithm": {"name": "grpo", "kl_coef": 0.05}, "rollout__stop": ["7"]}
DAPO = {"algorithm": {"name": "dapo", "max_generations": 3}, "reward__function": f"{REWARDS}:unequal_on_odd_rows"}
FEW_ROWS = {
    **TIED,
    "algorithm": {"name": "remax", "kl_coef": 0.1, "kl_target": 0.05},
    "trainer__group_size": 1,
    "trainer__prompts_per_step": 1,
}
"""One row a step: a rank of two has none."""
SEPARATE_MASTERS = {**TIED, "model__amp_dtype": "bfloat16", "trainer__total_steps": 3, "trainer__keep_checkpoints": 3}

BY_ROUNDING = {"critic/clip_frac", "actor/clip_frac", "actor/clip_frac_dual"}
"""Shares of tokens past a bound: which side one is on that lies at it, the last bit decides."""


def run(folder: Path, last: int, **changes: Any) -> None:
    """Make the steps up to ``last`` of a run that may have begun."""
    folder.mkdir(exist_ok=True)
    trainer = PPOTrainer.from_config(OnPolicyRun.parse(sections(folder, **changes)))
    try:
        trainer.run(last)
    finally:
        trainer.close()


def assert_same_steps(straight: Path, legs: Path, rel: float = 2e-4) -> None:
    expected, found = metrics_of(straight / "run"), metrics_of(legs / "run")
    assert len(expected) == len(found)
    for one, many in zip(expected, found, strict=True):
        assert one.keys() == many.keys()
        compared = one.keys() - BY_ROUNDING
        wrong = {k: (one[k], many[k]) for k in compared if many[k] != pytest.approx(one[k], rel=rel, abs=1e-5)}
        assert wrong == {}, f"step {one['step']}"
    for name, rows in rollouts_of(straight / "run").items():
        others = rollouts_of(legs / "run")[name]
        assert [row["response"] for row in rows] == [row["response"] for row in others], name


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint's policy, as plain transformers loads it."""
    newest = folder / "run" / "checkpoints" / checkpoints_of(folder / "run")[-1]
    model = AutoModelForCausalLM.from_pretrained(newest / "actor" / "model", dtype=torch.float32)
    return dict(model.named_parameters())


def assert_same_weights(straight: Path, legs: Path, atol: float = 1e-5) -> None:
    expected, found = weights_of(straight), weights_of(legs)
    assert expected.keys() == found.keys()
    for name in expected:
        assert torch.allclose(found[name], expected[name], atol=atol, rtol=0), name


@pytest.mark.parametrize(
    ("changes", "legs"),
    [
        (PPO, [ONE, DP2, TP2, PP2, SP2, ONE]),
        (KL_IN_LOSS, [PP2, ONE, TP2, APART]),
        (GRPO, [{**DP2, "profile__steps": [2]}, ONE]),
        (DAPO, [DP2, ONE]),
        (FEW_ROWS, [TP2, DP2]),
    ],
    ids=["ppo", "kl in the loss", "grpo", "dapo", "few rows"],
)
def test_a_run_of_many_placements_is_that_of_one_process(
    tmp_path: Path, changes: dict[str, Any], legs: list[dict[str, Any]]
) -> None:
    validation = {"data__val": str(write_jsonl(tmp_path / "val.jsonl", prompts(3))), "validation__every": 2}
    changes = {**changes, **validation, "trainer__total_steps": 2 * len(legs)}
    run(tmp_path / "straight", 2 * len(legs), **changes)
    for number, leg in enumerate(legs, 1):
        run(tmp_path / "legs", 2 * number, **{**changes, **leg})
        assert checkpoints_of(tmp_path / "legs" / "run")[-1] == f"step_{2 * number:06d}"
        assert weights_of(tmp_path / "legs")
    traced = {f"step_000002.rank{rank}.json" for rank in (0, 1) if any("profile__steps" in leg for leg in legs)}
    assert {path.name for path in (tmp_path / "legs" / "run").glob("traces/*")} == traced
    assert_same_steps(tmp_path / "straight", tmp_path / "legs")
    assert f"{VALIDATION}score/mean" in metrics_of(tmp_path / "legs" / "run")[-1]
    assert_same_weights(tmp_path / "straight", tmp_path / "legs")


def masters_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """What the optimizer's part of a checkpoint keeps of float32 weights, whole."""
    folder = checkpoint / "actor" / "optimizer"
    dcp_to_torch_save(folder, folder / "whole.pt")
    state = torch.load(folder / "whole.pt")
    return {key: tensor for key, tensor in state.items() if key.startswith("master.")}


def test_float32_masters_go_on_under_another_layout(tmp_path: Path) -> None:
    """bfloat16 rounds differently on every layout, so curves part; at a rate of 0 masters stay what they were saved as,
    to the last bit, through two other layouts, and the model beside them is what they round to."""
    run(tmp_path, 1, **SEPARATE_MASTERS, **DP2)
    for last, leg in ((2, TP2), (3, ONE)):
        run(tmp_path, last, **{**SEPARATE_MASTERS, **leg, "actor__optim__lr": 0.0})
    first, second, third = (tmp_path / "run" / "checkpoints" / f"step_{step:06d}" for step in (1, 2, 3))
    masters = masters_of(first)
    assert len(masters) == len(weights_of(tmp_path))
    for later in (second, third):
        found = masters_of(later)
        assert found.keys() == masters.keys() and all(torch.equal(found[key], masters[key]) for key in masters)
    for name, weight in weights_of(tmp_path).items():
        master = masters[f"master.{name}"]
        assert torch.equal(weight, master.bfloat16().float()) and not torch.equal(weight, master), name


def test_processes_that_torchrun_started_make_the_same_run(tmp_path: Path) -> None:
    changes = {**PPO, "critic__parallel": {"tensor_parallel_size": 2}}
    for place in ("straight", "legs"):
        (tmp_path / place).mkdir()
    run(tmp_path / "straight", 2, **PPO)
    file = config_file(tmp_path / "legs", **changes)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "verl", "train", str(file)]
    done = subprocess.run(launch, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert_same_steps(tmp_path / "straight", tmp_path / "legs")
    assert_same_weights(tmp_path / "straight", tmp_path / "legs")


@pytest.mark.skipif(find_spec("ray") is None, reason="ray isn't installed")
def test_ray_makes_the_same_run(tmp_path: Path) -> None:
    """In a process of its own, which Ray leaves as it found it when it ends."""
    changes = {**GRPO, "placement": {"executor": "ray", "devices": 2}}
    for place in ("straight", "legs"):
        (tmp_path / place).mkdir()
    run(tmp_path / "straight", 2, **GRPO)
    done = verl("train", str(config_file(tmp_path / "legs", **changes)))
    assert done.returncode == 0, done.stderr
    assert_same_steps(tmp_path / "straight", tmp_path / "legs")
    assert_same_weights(tmp_path / "straight", tmp_path / "legs")
