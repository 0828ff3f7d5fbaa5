"""Sequence parallelism: the ranks of the sp axis split the tokens of a micro-batch, whatever rows they belong to.

Every rank of the axis is given the same packed rows, runs the network on its own run of tokens, and gets the outputs
of all. In attention, where tokens meet, two exchanges turn a run of tokens with all heads into all tokens with a share
of the heads, and back. So a row may be longer than what fits on one rank. It knows nothing of losses or weights.

Shape letters: S ranks of the axis, N packed tokens of all ranks, n = N / S, M response tokens, H query heads,
K key/value heads, D head dim.

Source: Jacobs et al. 2023, arXiv:2309.14509 (DeepSpeed Ulysses).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from verl.common.errors import ConfigError
from verl.engines.mesh import Mesh
from verl.models.attention import Attention, PackedAttention, Scoring
from verl.models.networks import Network, PackedRows


class SequenceParallelNetwork:
    """``network`` on this rank's tokens, with the outputs of all ranks: rows go in whole and come out whole.

    Each rank's loss is the same and its backward pass carries the gradient of its own tokens alone: added up over the
    axis they make the whole gradient, once.
    """

    def __init__(self, network: Network, mesh: Mesh) -> None:
        self.network, self.mesh = network, mesh
        self.module, self.lm, self.offset = network.module, network.lm, network.offset

    def __call__(self, rows: PackedRows, entropy: bool = False) -> dict[str, Tensor]:
        size, group = self.mesh.sp_size, self.mesh.sp_group
        assert group is not None
        own, counts = own_tokens(rows, self.mesh.sp_rank, size, group)
        outputs = self.network(own, entropy)
        return {name: _GatherRuns.apply(values, counts, group) for name, values in outputs.items()}  # type: ignore[no-untyped-call]

    def hidden(self, rows: PackedRows) -> Tensor:
        """Hidden states [n, C] of this rank's tokens, for the next stage of a pipeline."""
        group = self.mesh.sp_group
        assert group is not None
        return self.network.hidden(own_tokens(rows, self.mesh.sp_rank, self.mesh.sp_size, group)[0])


def own_tokens(rows: PackedRows, rank: int, size: int, group: dist.ProcessGroup) -> tuple[PackedRows, list[int]]:
    """The ``rank``-th of ``size`` equal runs of tokens, and how many response tokens each run predicts.

    Tokens that make the length a multiple of ``size`` are a row of their own, which nothing reads.
    """
    assert isinstance(rows.attention, PackedAttention)
    extra = -len(rows.input_ids) % size
    lengths = torch.tensor([*rows.attention.lengths, *([extra] if extra else [])])
    run = (len(rows.input_ids) + extra) // size
    tokens = slice(rank * run, (rank + 1) * run)
    positions = torch.cat([rows.position_ids, torch.arange(extra, device=rows.position_ids.device)])
    owner = rows.predict_at // run
    is_own = owner == rank
    own = PackedRows(
        input_ids=pad(rows.input_ids, (0, extra))[tokens],
        position_ids=positions[tokens],
        attention=SharedHeads(PackedAttention(lengths, rows.input_ids.device), group),
        predict_at=rows.predict_at[is_own] - rank * run,
        targets=rows.targets[is_own],
    )
    return own, torch.bincount(owner, minlength=size).tolist()


class SharedHeads:
    """``attention`` over the tokens of all ranks of ``group``, each rank computing a share of the heads.

    query [n, H, D], key and value [n, K, D] of this rank's tokens go in; [n, H, D] comes out.
    """

    def __init__(self, attention: Attention, group: dist.ProcessGroup) -> None:
        self.attention, self.group = attention, group

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        repeats = kv_repeats(query.shape[1], key.shape[1], self.group.size())
        key, value = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (key, value))
        q, k, v = (_tokens_of_all(x, self.group) for x in (query, key, value))
        out = self.attention(layer, q, k, v, scoring)
        return _heads_of_all(out, self.group)


def kv_repeats(heads: int, kv_heads: int, size: int) -> int:
    """How often each key/value head is repeated so that every rank's query heads find theirs beside them.

    Raises ConfigError naming ``sequence_parallel_size`` when the query heads can't be shared evenly.
    """
    check_heads(heads, size)
    per_kv_head = heads // kv_heads
    return next(r for r in range(1, per_kv_head + 1) if per_kv_head % r == 0 and kv_heads * r % size == 0)


def check_heads(heads: int, size: int) -> None:
    """Raise ConfigError naming ``sequence_parallel_size`` when ``size`` ranks can't share ``heads`` evenly."""
    if heads % size:
        raise ConfigError(
            f"sequence_parallel_size={size} doesn't divide the {heads} attention heads that a rank has: set "
            f"sequence_parallel_size to a divisor of {heads}"
        )


def _tokens_of_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, H, D] with all heads to [N, H / S, D] with all tokens."""
    tokens, heads, dim = x.shape
    by_owner = x.view(tokens, group.size(), heads // group.size(), dim).transpose(0, 1)
    exchanged: Tensor = _Exchange.apply(by_owner, group)  # type: ignore[no-untyped-call]
    return exchanged.flatten(0, 1)


def _heads_of_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[N, H / S, D] with all tokens to [n, H, D] with all heads."""
    exchanged: Tensor = _Exchange.apply(x.unflatten(0, (group.size(), -1)), group)  # type: ignore[no-untyped-call]
    return exchanged.transpose(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """[S, ..]: the i-th part goes to rank i, what rank i sent comes to the i-th place. Its gradient goes the way
    back, which is the same exchange."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        sent_back = grads[0].contiguous()
        received = torch.empty_like(sent_back)
        dist.all_to_all_single(received, sent_back, group=ctx.group)
        return received, None


class _GatherRuns(torch.autograd.Function):
    """The outputs of all ranks end to end, ``counts`` long each. The same loss follows on every rank, so a rank's
    part of the gradient is all there is of it: it is cut out, not added up."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.counts, ctx.rank = counts, dist.get_rank(group)
        width = max(counts)
        if width == 0:
            return own.clone()
        pieces = own.new_empty(len(counts), width)
        dist.all_gather(list(pieces), pad(own, (0, width - len(own))), group=group)
        return torch.cat([piece[:count] for piece, count in zip(pieces, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        start = sum(ctx.counts[: ctx.rank])
        return grads[0][start : start + ctx.counts[ctx.rank]].contiguous(), None, None
