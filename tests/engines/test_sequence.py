from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import run_ranks
from verl.common.errors import ConfigError
from verl.engines.sequence import SharedHeads, kv_repeats, own_tokens
from verl.models.attention import PackedAttention, Scoring
from verl.models.networks import PackedRows

CPU = torch.device("cpu")
LENGTHS = [5, 1, 8, 4]  # 18 tokens: over two ranks the third row is cut, over four the end is filled up


def packed() -> PackedRows:
    """Rows of ``LENGTHS`` whose last two tokens each are responses; the row of one token has none."""
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    predict_at = torch.tensor([2, 3, 11, 12, 15, 16])
    ids = 10 + torch.arange(len(positions))
    return PackedRows(ids, positions, PackedAttention(torch.tensor(LENGTHS), CPU), predict_at, ids[predict_at + 1])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "repeats"),
    [(8, 8, 2, 1), (8, 2, 2, 1), (8, 1, 2, 2), (8, 2, 4, 2), (6, 2, 3, 3), (12, 2, 4, 2), (12, 4, 6, 3)],
)
def test_key_value_heads_are_repeated_no_more_than_needed(heads: int, kv_heads: int, size: int, repeats: int) -> None:
    assert kv_repeats(heads, kv_heads, size) == repeats


def test_heads_that_cannot_be_shared() -> None:
    with pytest.raises(ConfigError, match=r"sequence_parallel_size=4 doesn't divide the 6 .* divisor of 6"):
        kv_repeats(6, 2, 4)


def test_runs_of_tokens() -> None:
    """18 tokens over 4 ranks: 5 each, the last two of which are a row that nothing reads."""

    def runs(rank: int) -> tuple[list[int], list[int], list[int], list[int], list[int], list[int]]:
        own, counts = own_tokens(packed(), rank, 4, dist.group.WORLD)
        lengths = own.attention.attention.lengths
        ids, at, targets = own.input_ids.tolist(), own.predict_at.tolist(), own.targets.tolist()
        return ids, own.position_ids.tolist(), at, targets, lengths, counts

    results = run_ranks(4, runs)
    assert [r[0] for r in results] == [[*range(10, 15)], [*range(15, 20)], [*range(20, 25)], [25, 26, 27, 0, 0]]
    assert [r[1] for r in results] == [[0, 1, 2, 3, 4], [0, 0, 1, 2, 3], [4, 5, 6, 7, 0], [1, 2, 3, 0, 1]]
    assert [r[2] for r in results] == [[2, 3], [], [1, 2], [0, 1]]
    assert [r[3] for r in results] == [[13, 14], [], [22, 23], [26, 27]]
    assert all(r[4] == [*LENGTHS, 2] and r[5] == [2, 0, 2, 2] for r in results)


def test_attention_and_its_gradient_are_those_of_one_rank() -> None:
    """Also where key/value heads are fewer than ranks, and where a window or a soft-cap is on."""
    cases = [(4, 4, None, None), (4, 1, None, None), (4, 2, 3, None), (2, 1, 3, 5.0)]

    def on_rank(rank: int) -> list[list[Tensor]]:
        own = slice(9 * rank, 9 * (rank + 1))
        attention = SharedHeads(PackedAttention(torch.tensor(LENGTHS), CPU), dist.group.WORLD)
        return [attended(attention, case, own) for case in cases]

    results = run_ranks(2, on_rank)
    for number, case in enumerate(cases):
        whole = attended(PackedAttention(torch.tensor(LENGTHS), CPU), case, slice(None))
        for got, expected in zip(zip(*(r[number] for r in results), strict=True), whole, strict=True):
            torch.testing.assert_close(torch.cat(got), expected, atol=1e-6, rtol=1e-5)


def attended(attention: object, case: tuple[int, int, int | None, float | None], own: slice) -> list[Tensor]:
    """Output and gradients of ``own`` tokens under a loss that weighs every output differently."""
    heads, kv_heads, window, softcap = case
    generator = torch.Generator().manual_seed(1)
    shapes = [(18, heads, 8), (18, kv_heads, 8), (18, kv_heads, 8), (18, heads, 8)]
    q, k, v, weight = (torch.randn(shape, generator=generator)[own] for shape in shapes)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = attention(0, q, k, v, Scoring(0.3, window, softcap))  # type: ignore[operator]
    (out * weight).sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad]  # type: ignore[list-item]
