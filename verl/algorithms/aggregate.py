"""Per-token losses to (sum, count). Nothing here divides by a count: the engine does, once, by the global one.

A mean of means over micro-batches or ranks depends on how the rows were cut; a sum of sums over a sum of counts
doesn't. A row without a token in the mask counts nowhere.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from verl.algorithms.masked import masked_sum
from verl.common.errors import ConfigError, ShapeError

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


def aggregate(values: Tensor, mask: Tensor, how: Aggregation, norm_tokens: int | None = None) -> tuple[Tensor, Tensor]:
    """The sum of ``values`` and the count that it is to be divided by, summed over all pieces of the update.

    values       [B, R] float  a loss a token; what stands outside the mask isn't read
    mask         [B, R] bool
    norm_tokens  the constant row length of "seq-mean-token-sum-norm": the longest response allowed
    Returns two float32 scalars; the count has no gradient.

    token-mean               sum over tokens               / tokens
    token-sum                sum over tokens               / nothing: the count is 0, see ``Loss.divisor``
    seq-mean-token-mean      sum over rows of the row mean / rows with a token
    seq-mean-token-sum       sum over rows of the row sum  / rows with a token
    seq-mean-token-sum-norm  sum over rows of the row sum  / (rows with a token * norm_tokens)
    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 12 (token-mean); Shao et al. 2024, arXiv:2402.03300, eq. 3
    (seq-mean-token-mean); Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783 (a constant norm). The norm is a constant
    of the config, never the width of a padded batch, which depends on the rows' neighbours.
    """
    if values.shape != mask.shape:
        raise ShapeError(f"values are {list(values.shape)}, their mask is {list(mask.shape)}")
    per_row = masked_sum(values, mask, dim=1)
    tokens = mask.sum(1)
    rows = (tokens > 0).sum().float()
    if how == "token-mean":
        return per_row.sum(), tokens.sum().float()
    if how == "token-sum":
        return per_row.sum(), torch.zeros_like(rows)
    if how == "seq-mean-token-mean":
        return (per_row / tokens.clamp(min=1)).sum(), rows
    if how == "seq-mean-token-sum":
        return per_row.sum(), rows
    if how == "seq-mean-token-sum-norm":
        assert norm_tokens is not None, "seq-mean-token-sum-norm needs the longest response allowed"
        return per_row.sum(), rows * norm_tokens
    raise ConfigError(f"loss_aggregation is {how!r}; allowed: {', '.join(get_args(Aggregation))}")


def for_metric(how: Aggregation) -> Aggregation:
    """The aggregation of a logged value: as the loss's, but a mean where the loss is a plain sum."""
    return "token-mean" if how == "token-sum" else how
