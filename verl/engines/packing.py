"""Rows of a batch to packed micro-batches under a token budget.

Knows lengths and ids; knows nothing of losses. The cut changes memory and speed, never results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from verl.batch import Batch
from verl.common.transfer import to_device
from verl.models.attention import PackedAttention
from verl.models.networks import PackedRows

EVEN_COST_TOKENS = 32768
"""Row length at which attention costs as much as the matrices: 12 times the hidden size, here that of a 3B model."""


def workload(length: int) -> float:
    """What a row of ``length`` tokens costs, in tokens of a short row: attention grows with the square."""
    return length * (1 + length / EVEN_COST_TOKENS)


def cut_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Row indices of each micro-batch: at most ``budget`` tokens together, a longer row alone.

    Longest first into the least laden of as few bins as first-fit-decreasing needs: near-equal micro-batches.
    """
    bins: list[list[int]] = []
    tokens: list[int] = []
    loads: list[float] = []
    for row in _longest_first(lengths):
        fits = [b for b, load in enumerate(tokens) if load + lengths[row] <= budget]
        if not fits:
            fits = [len(bins)]
            bins.append([])
            tokens.append(0)
            loads.append(0.0)
        best = min(fits, key=lambda b: loads[b])
        bins[best].append(row)
        tokens[best] += lengths[row]
        loads[best] += workload(lengths[row])
    return [sorted(rows) for rows in bins]


def cut_into(bins: Sequence[Sequence[int]], lengths: Sequence[int], count: int) -> list[list[int]]:
    """``bins`` of ``cut_by_tokens`` as ``count`` bins, no fewer than there are: the heaviest are halved, and where no
    bin has two rows left the rest are empty. So ranks with unequal rows make equally many passes."""
    assert count >= len(bins)
    cut = [list(rows) for rows in bins]
    while len(cut) < count:
        heavy = max(
            (b for b, rows in enumerate(cut) if len(rows) > 1),
            key=lambda b: sum(workload(lengths[row]) for row in cut[b]),
            default=None,
        )
        if heavy is None:
            return cut + [[] for _ in range(count - len(cut))]
        rows = cut.pop(heavy)
        halves = balanced_shards([lengths[row] for row in rows], 2)
        cut += [[rows[i] for i in half] for half in halves]
    return cut


def balanced_shards(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Row indices of each of ``count`` ranks, in rising order: row counts differ by one at most, workloads by little.

    Longest first to the least laden rank with room; numbers that come back are put in order by these indices.
    """
    shards: list[list[int]] = [[] for _ in range(count)]
    loads = [0.0] * count
    each, left = divmod(len(lengths), count)
    for row in _longest_first(lengths):
        open_to = each + (sum(len(shard) > each for shard in shards) < left)
        best = min((s for s in range(count) if len(shards[s]) < open_to), key=lambda s: loads[s])
        shards[best].append(row)
        loads[best] += workload(lengths[row])
    return [sorted(rows) for rows in shards]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def kept_together(batch: Batch) -> list[list[int]]:
    """The rows that a loss compares, as one unit each: those of one ``pair_id``; without that column each row alone.

    A unit is never cut: its rows are in one micro-batch and on one rank.
    """
    if "pair_id" not in batch:
        return [[row] for row in range(len(batch))]
    units: dict[int, list[int]] = {}
    for row, pair in enumerate(batch["pair_id"].tolist()):
        units.setdefault(pair, []).append(row)
    return list(units.values())


def unit_lengths(batch: Batch, units: Sequence[Sequence[int]]) -> list[int]:
    """Tokens of each of ``units``."""
    lengths = row_lengths(batch).tolist() if len(batch) else []
    return [sum(lengths[row] for row in unit) for unit in units]


def rows_of(units: Sequence[Sequence[int]], bins: Sequence[Sequence[int]]) -> list[list[int]]:
    """``bins`` of units as bins of rows, in rising order."""
    return [sorted(row for unit in bin_ for row in units[unit]) for bin_ in bins]


def in_batch_order(values: Tensor, rows: Sequence[int], batch: Batch) -> Tensor:
    """[N] numbers of response tokens, those of ``rows`` one row after the other, in the order of ``batch``.

    rows  all of the batch's, each once
    """
    if not rows:
        return values
    pieces = values.split(batch.lengths("response_ids")[list(rows)].tolist())
    place = {row: number for number, row in enumerate(rows)}
    return torch.cat([pieces[place[row]] for row in range(len(rows))])


def row_lengths(batch: Batch) -> Tensor:
    """[B] tokens of each row, prompt and response."""
    return batch.lengths("prompt_ids") + batch.lengths("response_ids")


def pack(batch: Batch, device: torch.device, offset: int = -1) -> PackedRows:
    """Lay the rows end to end; no rows make one token that predicts nothing, so that every rank can run a pass.

    offset  from a response token to the position that its number is read from (``Network.offset``)
    The token before a response token predicts it: every prompt has at least one token.
    """
    if not len(batch):
        return _idle(device)
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
        input_ids=to_device(ids, device),
        position_ids=to_device(position, device),
        attention=PackedAttention(total, device),
        predict_at=to_device(is_response.nonzero()[:, 0] + offset, device),
        targets=to_device(batch["response_ids"], device),
    )


def _idle(device: torch.device) -> PackedRows:
    one, none = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    return PackedRows(one, one, PackedAttention(torch.ones(1, dtype=torch.int64), device), none, none)
