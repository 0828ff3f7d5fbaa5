"""Sums, means and variances over the places where a mask is True.

What stands outside the mask is never multiplied, only replaced, so NaN there stays there. Nothing here is averaged
over pieces: the caller passes all the places a statistic runs over.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDING = 8 * torch.finfo(torch.float32).eps
"""Values whose spread is below this fraction of their size differ by float32 rounding only: they count as equal."""


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of ``values`` where ``mask``; over everything or over ``dim``."""
    return torch.where(mask, values, 0.0).sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean where ``mask``; 0 where the mask is empty."""
    return masked_sum(values, mask, dim) / mask.sum(dim).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Sample variance (divisor n - 1) where ``mask``; 0 of fewer than two places."""
    centred = values - masked_mean(values, mask)
    return masked_sum(centred.square(), mask) / (mask.sum() - 1).clamp(min=1)


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Largest value where ``mask``; -inf where the mask is empty."""
    filled = torch.where(mask, values, -torch.inf).flatten()
    return torch.cat([filled, filled.new_full((1,), -torch.inf)]).max()


def masked_min(values: Tensor, mask: Tensor) -> Tensor:
    """Smallest value where ``mask``; inf where the mask is empty."""
    return -masked_max(-values, mask)


def varies(values: Tensor, mask: Tensor) -> Tensor:
    """Scalar bool: whether the values where ``mask`` differ by more than float32 rounding."""
    wide = values.double()
    mean_square = masked_mean(wide.square(), mask)
    return masked_var(wide, mask) > ROUNDING**2 * mean_square


def whiten(values: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + eps) where ``mask``, 0 elsewhere; all 0 where the values are equal up to rounding.

    Variance is the sample variance. The statistics are computed in float64.
    """
    wide = values.double()
    scaled = (wide - masked_mean(wide, mask)) * torch.rsqrt(masked_var(wide, mask) + eps)
    return torch.where(mask & varies(values, mask), scaled, 0.0).to(values.dtype)
