"""The critic's clipped regression loss, a number a token. Knows values, returns and a mask; doesn't sum."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Half the squared error, the larger of the plain one and that of the value kept within ``value_clip`` of the old.

    values [B, R] with gradient; old_values, returns [B, R]. Returns the loss [B, R] and [B, R] bool: where the value
    was farther away and the clipped error is the larger.
    Source: Schulman et al. 2017's released code, as recorded in Huang et al. 2022, "The 37 implementation details of
    PPO", detail 9.
    """
    plain = (values - returns).square()
    if value_clip is None:
        return plain / 2, torch.zeros_like(plain, dtype=torch.bool)
    moved = values - old_values
    near = old_values + moved.clamp(-value_clip, value_clip)
    clipped = (near - returns).square()
    is_far = moved.abs() > value_clip  # of others ``near`` is the value but for rounding
    return torch.maximum(plain, clipped) / 2, ((clipped > plain) & is_far).detach()
