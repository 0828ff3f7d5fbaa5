"""From the scores of whole responses to rewards of tokens: which rows count, where a score stands.

Knows the batch's score, mask and finish columns; not how advantages come of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algorithms.masked import masked_max, masked_mean, masked_min
from verl.algorithms.overlong import Ramp, overlong_loss
from verl.batch import Batch, FinishReason


@dataclass(frozen=True)
class Credit:
    """The rows of a step as an algorithm sees them.

    keep           [B] bool       rows whose score counts
    scores         [B] float32    0 on the other rows; less what an overlong response loses
    mask           [B, R] bool    sampled tokens of kept rows
    token_rewards  [B, R] float32 each kept score on the last sampled token of its row, 0 elsewhere
    """

    keep: Tensor
    scores: Tensor
    mask: Tensor
    token_rewards: Tensor


def counted_rows(batch: Batch) -> Tensor:
    """[B] bool, on the device of the scores: rows whose score counts.

    It doesn't where the reward failed (``is_scored`` False, or a score that isn't finite) or the engine gave the
    response up (``finish_reason`` ABORT).
    """
    scores = batch["scores"]
    keep = torch.isfinite(scores)
    if "is_scored" in batch:
        keep &= batch["is_scored"].to(scores.device)
    if "finish_reason" in batch:
        keep &= batch["finish_reason"].to(scores.device) != int(FinishReason.ABORT)
    return keep


def assign_credit(batch: Batch, overlong: Ramp | None = None, also: Tensor | None = None) -> Credit:
    """Read scores and masks of ``batch`` and take out the rows that don't count; ``overlong`` shapes the scores.

    also  [B] bool  False takes a row out besides those that ``counted_rows`` leaves out
    The ``response_mask`` of such a row is written back as False, so that it leaves the sums and the counts of every
    loss. A kept row without a sampled token has its score in group statistics and nothing else.
    """
    mask = batch.padded("response_mask").bool()
    scores = batch["scores"].to(mask.device)
    keep = counted_rows(batch).to(mask.device)
    if also is not None:
        keep &= also.to(mask.device)
    mask = mask & keep[:, None]
    batch.put_padded("response_mask", mask)
    shaped = scores.float() if overlong is None else scores.float() + overlong_loss(mask.sum(1), overlong)
    scores = torch.where(keep, shaped, 0.0)
    return Credit(keep, scores, mask, place_scores(scores, mask))


def place_scores(scores: Tensor, mask: Tensor) -> Tensor:
    """[B, R]: each score [B] on the last place of its row where ``mask`` is True; nowhere in a row without one."""
    places = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, places, -1).amax(1, keepdim=True) if mask.shape[1] else places.new_zeros(len(mask), 1)
    return torch.where(mask & (places == last), scores[:, None], 0.0)


def credit_metrics(credit: Credit, advantages: Tensor) -> dict[str, float]:
    """Rows that took no part, and the advantages over sampled tokens."""
    metrics = {
        "algorithm/rows_excluded": float((~credit.keep).sum()),
        "algorithm/rows_empty": float((credit.keep & ~credit.mask.any(1)).sum()),
    }
    if bool(credit.mask.any()):
        metrics["algorithm/advantages/mean"] = float(masked_mean(advantages, credit.mask))
        metrics["algorithm/advantages/max"] = float(masked_max(advantages, credit.mask))
        metrics["algorithm/advantages/min"] = float(masked_min(advantages, credit.mask))
    return metrics
