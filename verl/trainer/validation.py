"""Scoring a data set: every row exactly once, whatever the batch size, and the mean over rows.

Used by the validation of a run and by ``verl eval``. It knows nothing of training.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from pathlib import PurePath
from typing import Any

import torch

from verl.batch import Batch, FinishReason
from verl.common.errors import RewardError
from verl.data.loader import batches
from verl.data.prompts import PromptRow
from verl.rewards.runner import RewardRunner
from verl.trainer.scoring import write_scores
from verl.workers.rollout import Rollout


@dataclass(frozen=True)
class Evaluation:
    """What came of scoring a data set.

    metrics  `score/mean` over rows, `pass@k`, `response_len/mean`, `failed_rewards`, `rows`; a mean a source
    rows     one mapping a response, as in a run's rollout files
    """

    metrics: dict[str, float]
    rows: list[dict[str, Any]]


def evaluate(
    dataset: Sequence[PromptRow], rollout: Rollout, rewards: RewardRunner, *, batch_rows: int, seed: int, passing: float
) -> Evaluation:
    """Sample ``rollout.group_size`` responses to each row of ``dataset`` and score them.

    batch_rows  prompts generated at a time; the result doesn't depend on it
    passing     least score that counts as solved in pass@k
    Raises RewardError when the reward failed on every response.
    """
    parts: list[Batch] = []
    for prompts in batches(dataset, batch_rows):
        part = rollout.generate(prompts, seed, "validation", places=[prompt.row_id for prompt in prompts])
        write_scores(part, rewards)
        parts.append(part)
    whole = Batch.cat(parts)
    if not bool(whole["is_scored"].any()):
        raise RewardError(f"the reward failed on all {len(whole)} responses to the held-out prompts")
    return Evaluation(_metrics(whole, rollout.group_size, passing), rollout_rows(whole))


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased chance that one of ``k`` of ``n`` samples, ``c`` of them right, is right.

    Source: Chen et al. 2021, arXiv:2107.03374, eq. 1.
    """
    return 1.0 - comb(n - c, k) / comb(n, k)


def rollout_rows(batch: Batch, **constants: Any) -> list[dict[str, Any]]:
    """One JSON-able mapping a response: prompt, response, score, log-probs and where they came from."""
    lengths = batch.lengths("response_ids").tolist()
    ids, log_probs = (batch[name].split(lengths) for name in ("response_ids", "rollout_log_probs"))
    rows = []
    for i, row in enumerate(batch.rows):
        rows.append(
            {
                **constants,
                "row_id": int(batch["row_id"][i]),
                "prompt": row["prompt"],
                "response": row["response"],
                "response_ids": ids[i].tolist(),
                "ground_truth": row["ground_truth"],
                "score": float(batch["scores"][i]) if bool(batch["is_scored"][i]) else None,
                "finish_reason": FinishReason(int(batch["finish_reason"][i])).word,
                "policy_version": int(batch["policy_version"][i]),
                "log_probs": [round(x, 6) for x in log_probs[i].tolist()],
            }
        )
    return rows


def _metrics(batch: Batch, group_size: int, passing: float) -> dict[str, float]:
    is_scored, scores = batch["is_scored"], batch["scores"]
    metrics = {
        "rows": float(len(batch) // group_size),
        "failed_rewards": float((~is_scored).sum()),
        "response_len/mean": float(batch.lengths("response_ids").float().mean()),
        "truncated_frac": float((batch["finish_reason"] == FinishReason.LENGTH).float().mean()),
    }
    metrics["score/mean"] = float(scores[is_scored].double().mean())
    solved = (torch.where(is_scored, scores, torch.zeros(())) >= passing).reshape(-1, group_size).sum(1).tolist()
    for k in (2**i for i in range(group_size.bit_length()) if 2**i <= group_size):
        metrics[f"pass@{k}"] = sum(pass_at_k(group_size, c, k) for c in solved) / len(solved)
    by_source: dict[str, list[float]] = defaultdict(list)
    for row, value, is_good in zip(batch.rows, scores.tolist(), is_scored.tolist(), strict=True):
        if is_good:
            by_source[PurePath(row["source"]).name].append(value)
    if len(by_source) > 1:
        metrics |= {f"score/{source}/mean": sum(v) / len(v) for source, v in by_source.items()}
    return metrics
