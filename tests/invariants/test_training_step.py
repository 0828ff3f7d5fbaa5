"""What a training step may not depend on: how it is cut, in which order its rows lie, who stands beside whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.batches import sampled_batch
from tests.tiny import FAMILIES, tiny_folder, tiny_model
from tests.trainer.runs import metrics_of, rollouts_of, sections, write_jsonl
from verl.algorithms import ALGORITHMS
from verl.batch import Batch
from verl.engines.base import TrainingEngine
from verl.engines.config import OptimConfig, TrainedConfig
from verl.models.causal_lm import CausalLM
from verl.models.networks import PolicyNetwork
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.sections import OnPolicyRun

CPU = torch.device("cpu")
PROMPTS, RESPONSES = [3, 5, 1, 7, 2, 4], [4, 1, 6, 2, 9, 3]
PPO = {"name": "ppo", "kl_coef": 0.1, "entropy_coef": 0.01}


def run(folder: Path, steps: int = 1, **changes: Any) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Metrics and weights after a short run over prompts of different lengths."""
    folder.mkdir()
    made = sections(folder, trainer__total_steps=steps, trainer__prompts_per_step=3, **changes)
    rows = [{"prompt": p, "ground_truth": str(len(p))} for p in ("1+1=", "2=", "1234+5=", "9+9+9=", "3", "12=")]
    write_jsonl(folder / "train.jsonl", rows)
    trainer = PPOTrainer.from_config(OnPolicyRun.parse(made))
    trainer.run()
    trainer.close()
    weights = {name: p.detach().clone() for name, p in trainer.parts.roles.module.named_parameters()}
    if trainer.parts.roles.critic is not None:
        critic = trainer.parts.roles.critic.engine.network.module
        weights |= {f"critic.{name}": p.detach().clone() for name, p in critic.named_parameters()}
    return metrics_of(folder / "run"), weights


def assert_close(one: tuple[Any, Any], other: tuple[Any, Any], tolerance: float = 2e-4) -> None:
    for a, b in zip(one[0], other[0], strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=tolerance), key
    for name, tensor in one[1].items():
        torch.testing.assert_close(tensor, other[1][name], atol=tolerance, rtol=0)


@pytest.mark.parametrize("algorithm", [{"name": "grpo", "kl_coef": 0.1}, PPO], ids=["grpo", "ppo"])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_the_cut_into_micro_batches(
    tmp_path: Path, algorithm: dict[str, Any], aggregation: str, mini_batches: int
) -> None:
    """Adam turns a rounding error into a step of its whole rate, so the rate is small and bounds the difference."""
    changes = {
        "algorithm": {**algorithm, "loss_aggregation": aggregation},
        "actor__mini_batches_per_epoch": mini_batches,
        "actor__optim__lr": 1e-3,
        "critic__optim__lr": 1e-3,
    }
    runs = []
    for budget in (100_000, 30, 12):
        budgets = {f"{role}__max_tokens_per_micro_batch": budget for role in ("actor", "critic", "reference")}
        runs.append(run(tmp_path / str(budget), **changes, **budgets))
    assert runs[0][0][0]["actor/grad_norm"] > 0.01
    assert_close(runs[1], runs[0])
    assert_close(runs[2], runs[0])


def test_responses_do_not_depend_on_sizes_of_the_rollout(tmp_path: Path) -> None:
    """Cache blocks, rows at a time and prefix sharing are speed, not results."""
    run(tmp_path / "a")
    run(tmp_path / "b", rollout__block_size=3, rollout__max_running_rows=2, rollout__prefix_cache=False)
    a, b = (rollouts_of(tmp_path / name / "run")["step_000001.jsonl"] for name in "ab")
    assert [row["response_ids"] for row in a] == [row["response_ids"] for row in b]
    for one, other in zip(a, b, strict=True):
        assert one["log_probs"] == pytest.approx(other["log_probs"], abs=1e-5)


def test_gradient_checkpointing(tmp_path: Path) -> None:
    changes = {"algorithm": PPO, "actor__optim__lr": 1e-3, "critic__optim__lr": 1e-3}
    plain = run(tmp_path / "plain", **changes)
    on = {"actor__gradient_checkpointing": True, "critic__gradient_checkpointing": True}
    assert_close(run(tmp_path / "checkpointed", **changes, **on), plain)


def test_validation_tracking_and_saving(tmp_path: Path) -> None:
    """What is written beside a run changes nothing of it."""
    plain = run(tmp_path / "plain", steps=3)
    beside = {"trainer__save_every": 1, "trainer__save_rollouts_every": 2, "profile__steps": [2]}
    assert run(tmp_path / "beside", steps=3, **beside)[0] == plain[0]


def updated(family: str, batch: Batch, budget: int = 100_000) -> tuple[dict[str, float], Tensor]:
    kind = ALGORITHMS.load("grpo")
    algorithm = kind(kind.Config(name="grpo", entropy_coef=0.01))
    config = TrainedConfig(optim=OptimConfig(lr=1e-3), max_tokens_per_micro_batch=budget)
    engine = TrainingEngine(PolicyNetwork(CausalLM(tiny_model(family))), config, CPU, "actor")
    metrics = engine.update(
        batch,
        lambda out, columns: algorithm.actor_loss(out["log_probs"], out["entropy"], columns),
        lr=1e-3,
        entropy=True,
    ).result()
    return metrics, torch.cat([p.detach().flatten() for p in engine.network.module.parameters()])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 4, 3]])
def test_the_order_of_rows(family: str, order: list[int]) -> None:
    batch = sampled_batch(PROMPTS, RESPONSES)
    straight, turned = (updated(family, b, budget=16) for b in (batch, batch.select(order)))
    for key, value in straight[0].items():
        assert turned[0][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    torch.testing.assert_close(turned[1], straight[1], atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_cut_for_every_family(family: str) -> None:
    batch = sampled_batch(PROMPTS, RESPONSES)
    whole, cut = (updated(family, batch, budget) for budget in (100_000, 11))
    for key, value in whole[0].items():
        assert cut[0][key] == pytest.approx(value, rel=1e-3, abs=1e-5), key
    torch.testing.assert_close(cut[1], whole[1], atol=5e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_every_family_learns_a_reward(tmp_path: Path, family: str) -> None:
    """The whole loop: with a reward for the word w9 its share grows."""
    folder = tiny_folder(tmp_path / "model", family, std=0.1)
    trainer = PPOTrainer(
        str(folder), [{"prompt": "w7 w8", "ground_truth": ""}], lambda response: response.split().count("w9") / 4,
        rollout={"max_response_tokens": 4, "ignore_eos": True}, actor={"optim": {"lr": 0.01}}, track={"trackers": []},
        trainer={"output_dir": str(tmp_path / "run"), "prompts_per_step": 1, "group_size": 32, "device": "cpu"},
    )  # fmt: skip
    scores = []
    for _ in range(25):
        scores.append(trainer.step()["reward/score/mean"])
    trainer.close()
    assert sum(scores[-5:]) / 5 > sum(scores[:5]) / 5 + 0.2, scores
    assert max(line["actor/rollout_log_prob_diff/max"] for line in metrics_of(tmp_path / "run")) < 1e-4
