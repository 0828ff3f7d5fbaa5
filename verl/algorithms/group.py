"""Statistics of the responses of one prompt. Knows scores and group ids; not tokens.

Every estimator that compares responses of one prompt takes its numbers from ``group_stats``, so that groups of none,
one or n equal members mean the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algorithms.masked import ROUNDING
from verl.common.errors import ShapeError


@dataclass(frozen=True)
class GroupStats:
    """What each row's group looks like; all [B], rows that aren't kept neither counted nor averaged.

    index     int64    which group the row is in, 0 .. groups - 1
    size      int64    kept members of the row's group
    centred   float64  score minus the group's mean; exactly 0 where the members are equal, where there is one
                       member only, and on rows that aren't kept
    std       float64  sample standard deviation (divisor n - 1); 0 of equal members or of one
    is_equal  bool     two or more members and all equal, up to float32 rounding
    groups    int      how many groups there are, and of them how many have no kept member, one, or equal ones
    """

    index: Tensor
    size: Tensor
    centred: Tensor
    std: Tensor
    is_equal: Tensor
    groups: int
    empty: int
    single: int
    equal: int


def group_stats(scores: Tensor, group_id: Tensor, keep: Tensor) -> GroupStats:
    """Mean and standard deviation by group, in float64.

    scores    [B] float  what stands on rows that aren't kept isn't read
    group_id  [B] int64  any ids, rows in any order
    keep      [B] bool   False takes the row out
    Raises ShapeError when the sizes differ.

    A group of one has nothing to be compared with: its centred score is 0, so the row doesn't train.
    """
    if not scores.shape == group_id.shape == keep.shape or scores.dim() != 1:
        raise ShapeError(
            f"scores {list(scores.shape)}, group_id {list(group_id.shape)} and keep {list(keep.shape)} must all be [B]"
        )
    x = torch.where(keep, scores.double(), 0.0)
    ids, index = torch.unique(group_id, return_inverse=True)
    size = _total(keep.long(), index, len(ids))
    mean = _total(x, index, len(ids)) / size.clamp(min=1)
    spread, magnitude = _spread(x, index, keep, len(ids))
    is_equal = (size > 1) & (spread <= ROUNDING * magnitude)
    centred = torch.where(keep & ~is_equal[index], x - mean[index], 0.0)  # of one member: x - x
    variance = _total(centred.square(), index, len(ids)) / (size - 1).clamp(min=1)
    return GroupStats(
        index=index,
        size=size[index],
        centred=centred,
        std=variance.sqrt()[index],
        is_equal=is_equal[index],
        groups=len(ids),
        empty=int((size == 0).sum()),
        single=int((size == 1).sum()),
        equal=int(is_equal.sum()),
    )


def group_metrics(stats: GroupStats) -> dict[str, float]:
    """How many groups there are and which part of them teaches nothing, by reason."""
    groups = max(stats.groups, 1)
    return {
        "algorithm/groups": float(stats.groups),
        "algorithm/groups_equal_frac": stats.equal / groups,
        "algorithm/groups_single_frac": stats.single / groups,
        "algorithm/groups_empty_frac": stats.empty / groups,
    }


def group_sum(values: Tensor, stats: GroupStats) -> Tensor:
    """[B]: the sum of ``values`` [B] over each row's group."""
    return _total(values, stats.index, stats.groups)[stats.index]


def _total(values: Tensor, index: Tensor, groups: int) -> Tensor:
    return values.new_zeros(groups).index_add(0, index, values)


def _spread(x: Tensor, index: Tensor, keep: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """[groups] largest minus smallest kept value, and the largest absolute one."""
    empty = x.new_full((groups,), -torch.inf)
    top = empty.scatter_reduce(0, index, torch.where(keep, x, -torch.inf), "amax")
    bottom = -empty.scatter_reduce(0, index, torch.where(keep, -x, -torch.inf), "amax")
    return top - bottom, torch.maximum(top.abs(), bottom.abs())
