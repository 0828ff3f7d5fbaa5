import pytest
import torch

from verl.models.attention import PackedAttention, Scoring
from verl.rollout.native.cache import KVCache, LayerShape
from verl.rollout.native.paged_attention import GatherAttention

HEADS, KV_HEADS, DIM = 4, 2, 8


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_pieces_over_the_cache_equal_one_dense_causal_pass(
    window: int | None, softcap: float | None, size: int
) -> None:
    """Rows of 1 to 19 tokens, computed in pieces cut at random, over blocks in random order."""
    generator = torch.Generator().manual_seed(size)
    lengths = [1, 4, 5, 16, 17, 19]
    rows = [tuple(torch.randn(n, h, DIM, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS)) for n in lengths]
    per_row = -(-max(lengths) // size)
    tables = (torch.randperm(len(rows) * per_row, generator=generator) + 1).reshape(len(rows), per_row)
    shape = LayerShape(KV_HEADS, DIM, DIM, torch.float32)
    cache = KVCache({0: shape}, len(rows) * per_row, size, torch.device("cpu"))
    done = [0] * len(rows)
    outs: list[list[torch.Tensor]] = [[] for _ in rows]
    while done != lengths:
        left = [n - d for n, d in zip(lengths, done, strict=True)]
        live = [i for i, n in enumerate(left) if n > 0]
        take = [int(torch.randint(1, left[i] + 1, (), generator=generator)) for i in live]
        spans = [slice(done[i], done[i] + n) for i, n in zip(live, take, strict=True)]
        slots = [
            (tables[i][:, None] * size + torch.arange(size)).flatten()[s] for i, s in zip(live, spans, strict=True)
        ]
        attention = GatherAttention(cache, torch.cat(slots), tables[live], [done[i] for i in live], take)
        q, k, v = (torch.cat([rows[i][part][s] for i, s in zip(live, spans, strict=True)]) for part in range(3))
        out = attention(0, q, k, v, Scoring(0.3, window, softcap))
        for i, piece, n in zip(live, out.split(take), take, strict=True):
            outs[i].append(piece)
            done[i] += n
    for pieces, (q, k, v) in zip(outs, rows, strict=True):
        expected = PackedAttention(torch.tensor([len(q)]), q.device)(0, q, k, v, Scoring(0.3, window, softcap))
        torch.testing.assert_close(torch.cat(pieces), expected, atol=1e-5, rtol=0)


def test_one_long_row_among_short_ones_is_not_padded_onto_them() -> None:
    cache = KVCache({}, 0, 16, torch.device("cpu"))
    queries = [2000, *[20] * 40]
    attention = GatherAttention(cache, torch.empty(0), torch.zeros(41, 125, dtype=torch.int64), [0] * 41, queries)
    assert [group.num_tokens for group in attention._groups] == [2020, 780]  # at most twice the work
