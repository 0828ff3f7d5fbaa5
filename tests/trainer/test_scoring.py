from __future__ import annotations

from typing import Any

import pytest

from tests.batches import sampled_batch
from verl.batch import Batch
from verl.common.errors import RewardError
from verl.rewards.config import RewardConfig
from verl.rewards.runner import RewardRunner
from verl.trainer.scoring import score


def scored(values: list[Any], **config: Any) -> tuple[Batch, dict[str, float]]:
    """A batch whose reward gives ``values``; an exception among them is raised."""
    batch = sampled_batch([2] * len(values), [3] * len(values))
    batch.rows = [{**row, "prompt": "p", "place": i} for i, row in enumerate(batch.rows)]

    def reward(place: int) -> Any:
        if isinstance(values[place], Exception):
            raise values[place]
        return values[place]

    with RewardRunner(reward, RewardConfig(workers=0, **config)) as rewards:
        return batch, score(batch, rewards)


def test_scores_and_their_statistics() -> None:
    batch, metrics = scored([1, 3.0, {"score": 5, "format": 1.0}, {"score": -1, "format": 0.0}])
    assert batch["scores"].tolist() == [1, 3, 5, -1] and batch["is_scored"].all()
    assert (metrics["reward/score/mean"], metrics["reward/score/max"], metrics["reward/score/min"]) == (2, 5, -1)
    assert metrics["reward/score/std"] == pytest.approx(5**0.5)
    assert metrics["reward/format/mean"] == 0.5


def test_failures_are_counted_by_kind_and_not_averaged() -> None:
    batch, metrics = scored([KeyError("x"), 4.0, float("nan"), "text", None])
    assert batch["is_scored"].tolist() == [False, True, False, False, False]
    assert batch["scores"].tolist() == [0, 4, 0, 0, 0]
    assert metrics["reward/score/mean"] == metrics["reward/score/min"] == 4
    assert (metrics["reward/error_count"], metrics["reward/invalid_count"], metrics["reward/timeout_count"]) == (
        1,
        3,
        0,
    )


def test_all_failed() -> None:
    with pytest.raises(RewardError, match=r"all 2 responses; the first: .*no answer"):
        scored([ValueError("no answer"), None])


def test_failures_as_zeros() -> None:
    batch, metrics = scored([ValueError("x"), 2.0], on_failure="zero")
    assert batch["is_scored"].all() and metrics["reward/score/mean"] == 1 and metrics["reward/error_count"] == 1


def test_a_reward_sees_text_ids_and_columns() -> None:
    batch = sampled_batch([2], [3])
    batch.rows = [{"prompt": "p", "response": "r", "ground_truth": [7], "source": "s", "level": 9}]
    seen: dict[str, Any] = {}

    def reward(prompt: str, response: str, ground_truth: Any, **row: Any) -> float:
        seen.update(row, prompt=prompt, response=response, ground_truth=ground_truth)
        return 0.0

    with RewardRunner(reward, RewardConfig(workers=0)) as rewards:
        score(batch, rewards)
    assert (seen["prompt"], seen["response"], seen["ground_truth"], seen["level"]) == ("p", "r", [7], 9)
    assert seen["prompt_ids"] == batch["prompt_ids"].tolist() and seen["response_ids"] == batch["response_ids"].tolist()
