"""Generalised advantage estimation. Knows rewards, values and a mask; not where any of them came from."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.common.errors import ShapeError


def gae(
    values: Tensor, token_rewards: Tensor, response_mask: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the tokens that the policy sampled.

    values         [B, R] float  critic values, in reward units
    token_rewards  [B, R] float  reward a token, after the KL penalty
    response_mask  [B, R] bool   True where the policy sampled the token
    Returns advantages, returns: both [B, R] float32, 0 outside the mask, detached.
    Raises ShapeError when the shapes differ.

    delta_t = r_t + gamma * V_next(t) - V_t,  A_t = delta_t + gamma * lambda * A_next(t),  return_t = A_t + V_t,
    where next(t) is the next *sampled* token: tool output between two sampled tokens is stepped over, without
    discount, and only the end of the row is an end. Rewards and values outside the mask aren't read.

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16. Whitening is the caller's.
    """
    if not values.shape == token_rewards.shape == response_mask.shape:
        shapes = [list(x.shape) for x in (values, token_rewards, response_mask)]
        raise ShapeError(f"gae needs equal shapes, got values {shapes[0]}, rewards {shapes[1]}, mask {shapes[2]}")
    baseline = torch.where(response_mask, values.detach().float(), 0.0)
    rewards = torch.where(response_mask, token_rewards.detach().float(), 0.0)
    delta = torch.where(response_mask, rewards + gamma * next_sampled(baseline, response_mask) - baseline, 0.0)
    decay = torch.where(response_mask, gamma * gae_lambda, 1.0)
    carried = discounted_from_the_end(delta, decay)
    advantages = torch.where(response_mask, carried, 0.0)
    return advantages, advantages + baseline


def next_sampled(values: Tensor, response_mask: Tensor) -> Tensor:
    """[B, R]: at each place the value at the next place where the mask is True, 0 where there is none."""
    rows, width = values.shape
    places = torch.arange(width, device=values.device).expand(rows, width)
    here_or_later = torch.where(response_mask, places, width).flip(1).cummin(1).values.flip(1)
    later = torch.nn.functional.pad(here_or_later[:, 1:], (0, min(width, 1)), value=width)
    return torch.nn.functional.pad(values, (0, 1)).gather(1, later)


def discounted_from_the_end(terms: Tensor, decay: Tensor) -> Tensor:
    """[B, R]: x_t = terms_t + decay_t * x_{t+1}, with 0 beyond the end."""
    out = torch.empty_like(terms)
    running = terms.new_zeros(len(terms))
    for t in reversed(range(terms.shape[1])):
        running = torch.addcmul(terms[:, t], decay[:, t], running)
        out[:, t] = running
    return out
