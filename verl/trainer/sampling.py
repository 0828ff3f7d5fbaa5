"""From the data to a scored batch: draw prompts, generate, score, and draw again while too few groups teach something.

In come the parts of a run and how far its data are; out go the step's batch, everything that was sampled for it, and
how far the data are then. What teaches nothing, and how often to draw again, the algorithm says. Knows no losses.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algorithms.credit import counted_rows
from verl.batch import Batch
from verl.data.prompts import PromptRow
from verl.observe.metrics import PhaseTimer
from verl.rewards.base import RewardResult
from verl.trainer.assembly import Parts
from verl.trainer.scoring import score_metrics, write_scores
from verl.trainer.sections import TrainerConfig
from verl.workers.rollout import Rollout

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drawn:
    """How far the data are after the whole steps of a run; a checkpoint holds it.

    batches      batches of prompts drawn
    empty_steps  steps in a row, up to the last one, that had nothing to learn from
    """

    batches: int = 0
    empty_steps: int = 0


@dataclass(frozen=True)
class Sampled:
    """What a step has to learn from.

    batch       the rows to learn from; without a row when the algorithm keeps none
    everything  all rows that were sampled, those of ``batch`` among them
    metrics     of the rewards of ``everything``, and of what was dropped
    drawn       what holds when the step is whole
    """

    batch: Batch
    everything: Batch
    metrics: dict[str, float]
    drawn: Drawn


def sample(parts: Parts, config: TrainerConfig, drawn: Drawn, *, step: int, timer: PhaseTimer) -> Sampled:
    """One scored batch for ``step``: a batch of prompts or, where the algorithm drops groups, as many as it takes.

    Drawing ends when ``prompts_per_step`` groups are kept, after the algorithm's ``max_generations`` rounds, or with
    the data. The first ``prompts_per_step`` kept groups are the batch, in the order in which they were drawn. Raises
    RewardError when the reward failed on everything.
    """
    rounds: list[Batch] = []
    results: list[RewardResult] = []
    while True:
        prompts = parts.loader.batch(drawn.batches + len(rounds))
        rounds.append(_generate(parts, prompts, config, step, len(rounds) * config.prompts_per_step, timer))
        with timer.phase("reward"):
            results += write_scores(rounds[-1], parts.rewards)
        if parts.greedy is not None:
            with timer.phase("greedy"):
                rounds[-1].put("greedy_scores", _greedy_scores(parts, parts.greedy, prompts, config.seed))
        everything, batches = Batch.cat(rounds), drawn.batches + len(rounds)
        metrics = score_metrics(everything, results) | _greedy_metrics(everything)
        keep = parts.algorithm.keeps(everything)
        if keep is None:
            return Sampled(everything, everything, metrics, Drawn(batches))
        is_full = _count_groups(everything, keep) >= config.prompts_per_step
        if is_full or len(rounds) >= parts.algorithm.max_generations or parts.loader.ends_at(batches):
            break
    batch = everything.select(first_groups(keep, everything["group_id"], config.prompts_per_step))
    empty_steps = 0 if len(batch) else drawn.empty_steps + 1
    if empty_steps:
        log.warning("step %d updates nothing: of %d groups none teaches anything", step, _count_groups(everything))
    metrics |= _drop_metrics(everything, keep, batch)
    metrics |= {"rollout/generations": float(len(rounds)), "algorithm/empty_steps": float(empty_steps)}
    return Sampled(batch, everything, metrics, Drawn(batches, empty_steps))


def first_groups(keep: Tensor, group_id: Tensor, count: int) -> Tensor:
    """[B] bool: of the rows to ``keep`` [B] those of the first ``count`` groups, by ``group_id`` [B]."""
    return keep & torch.isin(group_id, torch.unique(group_id[keep])[:count])


def _generate(
    parts: Parts, prompts: Sequence[PromptRow], config: TrainerConfig, step: int, first: int, timer: PhaseTimer
) -> Batch:
    """Responses to ``prompts``, which are those from number ``first`` of the step."""
    places = range(first, first + len(prompts))
    with timer.phase("generate"):
        batch = parts.rollout.generate(prompts, config.seed, "train", step, places=places)
    batch.put("group_id", batch["group_id"] + first)
    return batch


def _greedy_scores(parts: Parts, greedy: Rollout, prompts: Sequence[PromptRow], seed: int) -> Tensor:
    """[B]: to each row of ``prompts``' responses the score of one greedy response; NaN where there is none."""
    batch = greedy.generate(prompts, seed)
    write_scores(batch, parts.rewards)
    scores = torch.where(counted_rows(batch), batch["scores"], torch.nan)
    return scores.repeat_interleave(parts.rollout.group_size)


def _greedy_metrics(batch: Batch) -> dict[str, float]:
    if "greedy_scores" not in batch:
        return {}
    good = batch["greedy_scores"].double()
    good = good[good.isfinite()]
    return {"reward/greedy_score/mean": float(good.mean())} if len(good) else {}


def _drop_metrics(everything: Batch, keep: Tensor, batch: Batch) -> dict[str, float]:
    kept = _count_groups(everything, keep)
    return {
        "algorithm/groups_dropped": float(_count_groups(everything) - kept),
        "algorithm/groups_surplus": float(kept - _count_groups(batch)),
    }


def _count_groups(batch: Batch, keep: Tensor | None = None) -> int:
    ids = batch["group_id"]
    return len((ids if keep is None else ids[keep]).unique())
