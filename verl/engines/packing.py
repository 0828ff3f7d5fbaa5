"""Rows of a batch to packed micro-batches under a token budget.

Knows lengths and ids; knows nothing of losses. The cut changes memory and speed, never results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from verl.batch import Batch
from verl.models.attention import PackedAttention
from verl.models.networks import PackedRows


def cut_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Row indices of each micro-batch: at most ``budget`` tokens together, a longer row alone.

    Longest first into the emptiest of as few bins as first-fit-decreasing needs: near-equal micro-batches.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins: list[list[int]] = []
    loads: list[int] = []
    for row in order:
        fits = [b for b, load in enumerate(loads) if load + lengths[row] <= budget]
        if fits:
            best = min(fits, key=lambda b: loads[b])
            bins[best].append(row)
            loads[best] += lengths[row]
        else:
            bins.append([row])
            loads.append(lengths[row])
    return [sorted(rows) for rows in bins]


def row_lengths(batch: Batch) -> Tensor:
    """[B] tokens of each row, prompt and response."""
    return batch.lengths("prompt_ids") + batch.lengths("response_ids")


def pack(batch: Batch, device: torch.device) -> PackedRows:
    """Lay the rows end to end. The token before a response token predicts it: every prompt has at least one token."""
    prompts, responses = batch.lengths("prompt_ids"), batch.lengths("response_ids")
    assert bool((prompts > 0).all()), "a prompt without tokens has nothing to predict from"
    total = prompts + responses
    starts = pad(total.cumsum(0), (1, 0))[:-1]
    position = torch.arange(int(total.sum())) - starts.repeat_interleave(total)
    is_response = position >= prompts.repeat_interleave(total)
    source = batch["prompt_ids"].device
    ids = torch.empty(len(position), dtype=torch.int64, device=source)
    ids[(~is_response).to(source)] = batch["prompt_ids"]
    ids[is_response.to(source)] = batch["response_ids"].to(source)
    return PackedRows(
        input_ids=ids.to(device, non_blocking=True),
        position_ids=position.to(device, non_blocking=True),
        attention=PackedAttention(total, device),
        predict_at=(is_response.nonzero()[:, 0] - 1).to(device, non_blocking=True),
        targets=batch["response_ids"].to(device, non_blocking=True),
    )
