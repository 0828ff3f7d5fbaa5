"""The frame of every estimator that gives a whole response one advantage: read the step, spread a number a row.

In comes a ``Batch``, out go its columns ``token_rewards``, ``advantages`` and ``returns``. What the number is, the
algorithm's file says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algorithms.credit import Credit, assign_credit, credit_metrics
from verl.algorithms.group import GroupStats, group_metrics, group_stats
from verl.algorithms.overlong import Ramp
from verl.batch import Batch

_EPS = 1e-6


@dataclass(frozen=True)
class Outcome:
    """The rows of a step, and the groups that they form."""

    credit: Credit
    groups: GroupStats


def read_outcome(batch: Batch, overlong: Ramp | None, also: Tensor | None = None) -> Outcome:
    """Scores, masks and groups of ``batch``; rows that don't count are taken out of it, as in ``assign_credit``."""
    credit = assign_credit(batch, overlong, also)
    return Outcome(credit, groups_of(batch, credit, credit.scores))


def groups_of(batch: Batch, credit: Credit, scores: Tensor) -> GroupStats:
    """Statistics of ``scores`` [B] over the groups of kept rows. Raises MissingField without ``group_id``."""
    return group_stats(scores, batch["group_id"].to(credit.mask.device), credit.keep)


def group_relative(groups: GroupStats, by_std: bool) -> Tensor:
    """[B] float64: score minus the group's mean and, ``by_std``, over its sample deviation plus 1e-6."""
    return groups.centred / (groups.std + _EPS) if by_std else groups.centred


def over_tokens(per_row: Tensor, mask: Tensor) -> Tensor:
    """[B, R] float32: each row's number on all its places where ``mask``, 0 elsewhere."""
    return torch.where(mask, per_row.float()[:, None], 0.0)


def write_outcome(batch: Batch, outcome: Outcome, per_row: Tensor) -> dict[str, float]:
    """Write ``per_row`` [B] as advantage of every sampled token; ``returns`` are the advantages. Gives the metrics."""
    advantages = over_tokens(per_row, outcome.credit.mask)
    return write_advantages(batch, outcome, outcome.credit.token_rewards, advantages, advantages)


def write_advantages(
    batch: Batch, outcome: Outcome, token_rewards: Tensor, advantages: Tensor, returns: Tensor
) -> dict[str, float]:
    """Write the three columns, all [B, R]; returns the metrics of rows, advantages and groups."""
    batch.put_padded("token_rewards", token_rewards)
    batch.put_padded("advantages", advantages)
    batch.put_padded("returns", returns)
    return credit_metrics(outcome.credit, advantages) | group_metrics(outcome.groups)
