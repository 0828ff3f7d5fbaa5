from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.batches import sampled_batch
from tests.rollout.engines import build
from tests.tiny import word_tokenizer
from tests.trainer.rewards import row_number
from tests.trainer.runs import REWARDS, metrics_of, prompts, rollouts_of, sections, write_jsonl
from verl.common.errors import RewardError
from verl.data.prompts import PromptRow
from verl.rewards.config import RewardConfig
from verl.rewards.runner import RewardRunner
from verl.rollout.base import SamplingParams
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.sections import OnPolicyRun
from verl.trainer.validation import Evaluation, evaluate, pass_at_k, rollout_rows
from verl.workers.rollout import Rollout

VAL = "validation/score/mean"


def rows(count: int, sources: int = 1) -> list[PromptRow]:
    return [PromptRow(i, f"w{i + 6}", (1, i + 6), str(i), {}, f"s{i % sources}") for i in range(count)]


def scored(
    count: int,
    reward: Any = row_number,
    *,
    batch_rows: int = 4,
    samples: int = 1,
    temperature: float = 0.0,
    sources: int = 1,
) -> Evaluation:
    sampling = SamplingParams(max_new_tokens=3, temperature=temperature)
    rollout = Rollout(build(), word_tokenizer(), sampling, samples)
    with RewardRunner(reward, RewardConfig(workers=0)) as rewards:
        return evaluate(rows(count, sources), rollout, rewards, batch_rows=batch_rows, seed=5, passing=5.0)


@pytest.mark.parametrize("batch_rows", [1, 3, 4, 10, 256])
def test_every_row_is_scored_once_whatever_the_batch(batch_rows: int) -> None:
    found = scored(10, batch_rows=batch_rows)
    assert found.metrics["score/mean"] == 4.5 and found.metrics["rows"] == 10
    assert [row["row_id"] for row in found.rows] == list(range(10))
    assert found.metrics["pass@1"] == 0.5  # the five of 5.0 and over


@pytest.mark.parametrize("batch_rows", [1, 2, 5])
def test_samples_do_not_depend_on_the_batch(batch_rows: int) -> None:
    one, other = (scored(5, batch_rows=n, samples=3, temperature=1.0).rows for n in (5, batch_rows))
    assert [row["response_ids"] for row in one] == [row["response_ids"] for row in other]
    assert len({tuple(row["response_ids"]) for row in one}) > 5


def test_pass_at_k_by_hand() -> None:
    """Of 4 samples 1 is right: a draw of 2 holds it with chance 1/2, a draw of 4 surely."""
    assert [pass_at_k(4, 1, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert pass_at_k(4, 0, 2) == 0.0 and pass_at_k(4, 4, 1) == 1.0
    assert pass_at_k(5, 2, 3) == pytest.approx(1 - 1 / 10)


def test_pass_at_k_of_samples() -> None:
    found = scored(2, lambda ground_truth: 9.0 if ground_truth == "1" else 0.0, samples=4, temperature=1.0)
    assert [found.metrics[f"pass@{k}"] for k in (1, 2, 4)] == [0.5, 0.5, 0.5]
    assert found.metrics["rows"] == 2 and len(found.rows) == 8


def test_a_mean_for_each_source() -> None:
    metrics = scored(5, sources=2).metrics
    assert (metrics["score/s0/mean"], metrics["score/s1/mean"], metrics["score/mean"]) == (2.0, 2.0, 2.0)
    assert not any(key.startswith("score/s0") for key in scored(3).metrics)


def fails_below(limit: int) -> Any:
    def reward(ground_truth: str) -> float:
        assert int(ground_truth) >= limit
        return float(ground_truth)

    return reward


@pytest.mark.parametrize("batch_rows", [1, 2, 8])
def test_failed_rewards_are_no_zeros(batch_rows: int) -> None:
    """Rows 0 to 2 fail: a whole batch of failures is no reason to stop, and the mean is of 3 .. 7."""
    found = scored(8, fails_below(3), batch_rows=batch_rows)
    assert found.metrics["failed_rewards"] == 3 and found.metrics["score/mean"] == 5.0
    assert [row["score"] for row in found.rows[:4]] == [None, None, None, 3.0]
    with pytest.raises(RewardError, match="failed on all 8"):
        scored(8, fails_below(99), batch_rows=batch_rows)


def test_rollout_rows_hold_what_was_sampled() -> None:
    batch = sampled_batch([2, 3], [1, 2])
    batch.put("scores", torch.tensor([0.5, 1.5]))
    batch.put("is_scored", torch.tensor([True, False]))
    made = rollout_rows(batch, step=3)
    assert [row["score"] for row in made] == [0.5, None]
    assert [len(row["response_ids"]) for row in made] == [len(row["log_probs"]) for row in made] == [1, 2]
    assert made[0]["step"] == 3 and made[1]["finish_reason"] == "stop"


def run(folder: Path, val_rows: int, **changes: Any) -> Path:
    val = write_jsonl(folder / "val.jsonl", prompts(val_rows))
    reward = {"function": f"{REWARDS}:row_number", "workers": 0}
    trainer = PPOTrainer.from_config(
        OnPolicyRun.parse(sections(folder, reward=reward, data__val=str(val), **{"rows": 4, **changes}))
    )
    trainer.run()
    trainer.close()
    return folder / "run"


@pytest.mark.parametrize(("per_step", "val_rows", "mean"), [(4, 10, 4.5), (1, 10, 4.5), (256, 3, 1.0)])
def test_a_run_validates_all_rows_at_start_and_end(tmp_path: Path, per_step: int, val_rows: int, mean: float) -> None:
    folder = run(tmp_path, val_rows, trainer__prompts_per_step=per_step, trainer__group_size=2, rows=4)
    lines = {line["step"]: line for line in metrics_of(folder)}
    assert {step: line.get(VAL) for step, line in lines.items()} == {0: mean, 1: None, 2: mean}
    assert lines[2]["validation/rows"] == val_rows
    found = rollouts_of(folder, "validation")
    assert list(found) == ["step_000000.jsonl", "step_000002.jsonl"]
    assert [row["row_id"] for row in found["step_000002.jsonl"]] == list(range(val_rows))


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"validation__every": 2}, [0, 2, 4, 5]),
        ({"validation__every": 5, "validation__at_start": False}, [5]),
        ({"validation__at_start": False}, [5]),
    ],
)
def test_the_schedule_of_validations(tmp_path: Path, changes: dict[str, Any], steps: list[int]) -> None:
    folder = run(tmp_path, 2, trainer__total_steps=5, **changes)
    assert [line["step"] for line in metrics_of(folder) if VAL in line] == steps


def test_training_does_not_depend_on_validation(tmp_path: Path) -> None:
    for name, every in (("a", 1), ("b", None)):
        (tmp_path / name).mkdir()
        run(tmp_path / name, 2, trainer__total_steps=3, validation__every=every, validation__temperature=1.0)
    assert rollouts_of(tmp_path / "a" / "run") == rollouts_of(tmp_path / "b" / "run")


def test_validation_rows_that_are_trained_on_are_named_or_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, 2)
    assert "2 of 2 validation prompts are training prompts too" in caplog.text
    other = tmp_path / "other"
    other.mkdir()
    folder = run(other, 2, data__exclude_val=True)
    assert {row["row_id"] for rows in rollouts_of(folder).values() for row in rows} == {2, 3}
