"""Rewards onto a batch: writes ``scores`` and ``is_scored``, and says what failed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl.batch import Batch
from verl.common.errors import RewardError
from verl.rewards.base import RewardItem, RewardResult
from verl.rewards.runner import RewardRunner


def score(batch: Batch, rewards: RewardRunner) -> dict[str, float]:
    """Score every row. A failed row has score 0 and ``is_scored`` False: no algorithm learns from it.

    Returns `reward/score/{mean,max,min,std}` over scored rows, `reward/{timeout,error,invalid}_count` of failures, and
    a mean of each part.
    Raises RewardError when every row failed, with the first failure's text.
    """
    return score_metrics(batch, write_scores(batch, rewards))


def score_metrics(batch: Batch, results: Sequence[RewardResult]) -> dict[str, float]:
    """The metrics of ``score``, of scores that are written. Raises RewardError when every row failed."""
    if results and not bool(batch["is_scored"].any()):
        raise RewardError(f"the reward failed on all {len(results)} responses; the first: {results[0].detail}")
    return _metrics(batch, results)


def write_scores(batch: Batch, rewards: RewardRunner) -> list[RewardResult]:
    """Write ``scores`` and ``is_scored`` of every row."""
    ids = {n: batch[f"{n}_ids"].split(batch.lengths(f"{n}_ids").tolist()) for n in ("prompt", "response")}
    results = rewards.score(
        [
            RewardItem(
                prompt=row["prompt"],
                response=row["response"],
                ground_truth=row["ground_truth"],
                row=row,
                prompt_ids=prompt_ids.tolist(),
                response_ids=response_ids.tolist(),
            )
            for row, prompt_ids, response_ids in zip(batch.rows, ids["prompt"], ids["response"], strict=True)
        ]
    )
    scores = [r.score for r in results]
    batch.put("is_scored", torch.tensor([s is not None for s in scores], dtype=torch.bool))
    batch.put("scores", torch.tensor([0.0 if s is None else s for s in scores], dtype=torch.float32))
    return results


def _metrics(batch: Batch, results: Sequence[RewardResult]) -> dict[str, float]:
    good = batch["scores"][batch["is_scored"]].double()
    metrics = {
        "reward/score/mean": float(good.mean()),
        "reward/score/std": float(good.std(correction=0)),
        "reward/score/max": float(good.max()),
        "reward/score/min": float(good.min()),
    }
    for kind in ("timeout", "error", "invalid"):
        metrics[f"reward/{kind}_count"] = float(sum(r.failure == kind for r in results))
    parts: dict[str, list[float]] = {}
    for result in results:
        for name, value in result.parts.items():
            parts.setdefault(name, []).append(value)
    return metrics | {f"reward/{name}/mean": sum(values) / len(values) for name, values in parts.items()}
