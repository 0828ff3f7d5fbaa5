import math

import pytest
import torch
from torch import Tensor

from tests.rollout.engines import request
from verl.rollout.native.row_state import RowState
from verl.rollout.native.sampler import gumbel, sample, truncate, truncates
from verl.rollout.native.sequence import Sequence


def state(
    count: int, vocab: int, first_seed: int = 0, stop_ids: frozenset[int] = frozenset(), **sampling: object
) -> RowState:
    settings = {"temperature": 1.0, "tokens": 4, **sampling}
    rows = [Sequence(request([1], seed=first_seed + i, **settings), [1], stop_ids) for i in range(count)]  # type: ignore[arg-type]
    return RowState.of(rows, vocab)


def draw(logits: Tensor, rows: RowState) -> tuple[Tensor, Tensor]:
    kept = [(rows.top_k > 0).any(), (rows.top_p < 1).any(), (rows.min_p > 0).any()]
    return sample(logits, rows, truncates=any(bool(x) for x in kept))


def counts(logits: list[float], n: int, **sampling: object) -> Tensor:
    """Draws of ``n`` seeds from one distribution."""
    tokens, _ = draw(torch.tensor([logits]).expand(n, -1), state(n, len(logits), **sampling))
    return torch.bincount(tokens, minlength=len(logits)).double()


def chi_square(seen: Tensor, probs: Tensor) -> float:
    expected = probs.double() * seen.sum()
    return float(((seen - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_tempered_softmax(temperature: float) -> None:
    logits = [2.0, 1.0, 0.0, -1.0, -2.0, 1.5, 0.3, 0.1]
    seen = counts(logits, 10_000, temperature=temperature)
    assert chi_square(seen, (torch.tensor(logits) / temperature).softmax(-1)) < 24.3  # 7 degrees of freedom, p = 0.001


def test_draws_at_successive_indices_are_independent() -> None:
    n, logits = 20_000, torch.tensor([0.4, 0.0, -0.3])
    one = state(n, 3)
    one.seed_low.fill_(5)
    one.index.copy_(torch.arange(n))
    tokens, _ = draw(logits.expand(n, -1), one)
    pairs = torch.bincount(tokens[:-1] * 3 + tokens[1:], minlength=9).double()
    probs = logits.softmax(-1)
    assert chi_square(pairs, torch.outer(probs, probs).flatten()) < 26.1  # 8 degrees, p = 0.001


def test_noise_is_standard_gumbel_without_favourites() -> None:
    seeds, zero = torch.arange(100_000, dtype=torch.int32), torch.zeros(100_000, dtype=torch.int32)
    for low, high, index in [(seeds, zero, zero), (zero, seeds, zero), (zero, zero, seeds)]:
        noise = gumbel(low, high, index, 8)
        assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
        assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)
        between = torch.corrcoef(noise.T) - torch.eye(8)
        along = torch.corrcoef(torch.stack([noise[:-1, 0], noise[1:, 0]]))[0, 1]
        assert float(between.abs().max()) < 0.016 and abs(float(along)) < 0.016  # five standard errors
        uniform = torch.exp(-torch.exp(-noise)).flatten()
        assert chi_square(torch.histc(uniform, 100, 0, 1).double(), torch.full((100,), 0.01)) < 149  # 99 degrees
    assert torch.isfinite(gumbel(zero[:300], seeds[:300], zero[:300], 20_000)).all()
    assert float(gumbel(zero[:1], zero[:1], zero[:1], 4).max()) < 10  # seed 0 is a seed like any other


def test_rare_tokens_of_a_large_vocabulary_are_drawn_as_often_as_they_should() -> None:
    logits = torch.zeros(50_000)
    logits[:2] = math.log(50_000)  # two likely ids and 49,998 of probability 6.7e-6 each, a third of the mass together
    tokens, _ = draw(logits.expand(1000, -1), state(1000, 50_000))
    rare = int((tokens >= 2).sum())
    assert abs(rare - 333.3) < 5 * math.sqrt(1000 / 3 * 2 / 3)


def test_noise_is_known_bit_for_bit() -> None:
    """A change here changes every seeded run: the hash computed by hand with Python integers."""
    mask = (1 << 32) - 1

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D & mask
        x = (x ^ x >> 15) * 0x846CA68B & mask
        return x ^ x >> 16

    low, high, index = 123456789, 3_000_000_000, 17
    first = mix((low + (index + 1) * 0x9E3779B9) & mask)
    second = mix((mix(high ^ first) + index + 1) & mask)
    expected = []
    for token in range(5):
        x = (token * 0x9E3779B9 + first) & mask
        x = (x ^ x >> 16) * 0x7FEB352D & mask ^ second
        x = (x ^ x >> 15) * 0x846CA68B & mask
        x ^= x >> 16
        expected.append(-math.log(-math.log1p(-((x & 0x7FFFFFFF) + 0.5) / 2**31)))
    one = state(1, 5, first_seed=high << 32 | low)
    noise = gumbel(one.seed_low, one.seed_high, torch.tensor([index], dtype=torch.int32), 5)[0]
    assert noise.tolist() == pytest.approx(expected, abs=1e-5)


def test_log_prob_is_tempered_and_untruncated_and_plain_when_greedy() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    _, half = draw(logits, state(1, 3, temperature=0.5, top_k=1))
    token, greedy = draw(logits, state(1, 3, temperature=0.0))
    assert float(half) == pytest.approx(-0.142932, abs=1e-6)
    assert int(token) == 0 and float(greedy) == pytest.approx(-0.407606, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.5}, {0}),  # id 0 alone has the mass
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.95}, {0, 1, 2, 3}),
        ({"top_k": 2, "top_p": 0.6}, {0}),  # 0.5 of 0.8 is 0.625
        ({"min_p": 0.3}, {0, 1}),
        ({"min_p": 0.6}, {0, 1}),
        ({"min_p": 0.61}, {0}),
    ],
)
def test_truncation_keeps_what_it_says(settings: dict[str, float], kept: set[int]) -> None:
    """Probabilities 0.5, 0.3, 0.12, 0.08, in another order of ids."""
    logits = torch.tensor([0.5, 0.3, 0.12, 0.08]).log()
    one = state(1, 4, **settings)
    scores = truncate(logits[None], one.top_k, one.top_p, one.min_p)[0]
    assert set(scores.isfinite().nonzero()[:, 0].tolist()) == kept
    torch.testing.assert_close(scores[sorted(kept)], logits[sorted(kept)])
    order = torch.tensor([2, 0, 3, 1])
    shuffled = truncate(logits[order][None], one.top_k, one.top_p, one.min_p)[0]
    torch.testing.assert_close(shuffled, scores[order])


def test_top_k_of_equal_logits_keeps_exactly_k() -> None:
    one = state(1, 6, top_k=2)
    assert truncate(torch.zeros(1, 6), one.top_k, one.top_p, one.min_p).isfinite().tolist() == [
        [True] * 2 + [False] * 4
    ]


def test_all_ids_can_be_drawn_with_neutral_settings() -> None:
    seen = counts([math.log(2.0)] * 20 + [0.0] * 44, 10_000)
    assert int((seen > 0).sum()) == 64


def test_rows_of_different_settings_do_not_mix() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)).expand(4, -1)
    settings = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 2.0, "min_p": 0.1},
    ]
    rows = [Sequence(request([1], seed=9, **s), [1], frozenset()) for s in settings]  # type: ignore[arg-type]
    tokens, log_probs = draw(logits, RowState.of(rows, 50))
    for i, row in enumerate(rows):
        alone = draw(logits[:1], RowState.of([row], 50))
        assert (int(tokens[i]), float(log_probs[i])) == (int(alone[0]), pytest.approx(float(alone[1])))


def test_banned_ids_are_never_drawn_before_the_minimum_also_under_top_k() -> None:
    logits = [5.0, 4.0, 0.0, 0.0]
    held = counts(logits, 500, min_new_tokens=1, stop_ids=frozenset([0, 1]))
    assert held[:2].sum() == 0 and (held[2:] > 0).all()
    cut = counts(logits, 500, min_new_tokens=1, stop_ids=frozenset([0]), top_k=1)
    assert cut.tolist() == [0, 500, 0, 0]
    free = counts(logits, 500, stop_ids=frozenset([0, 1]))
    assert free[0] > free[1] > 0
    minima_and_ids = [(1, [0, 1]), (0, [0]), (1, [])]
    mixed = [Sequence(request([1], min_new_tokens=n), [1], frozenset(ids)) for n, ids in minima_and_ids]
    tokens, _ = draw(torch.tensor([logits]).expand(3, -1), RowState.of(mixed, 4))
    assert tokens.tolist() == [2, 0, 0]


def test_whether_rows_truncate_is_seen() -> None:
    def rows(**sampling: float) -> list[Sequence]:
        return [Sequence(request([1], **s), [1], frozenset()) for s in ({}, sampling)]  # type: ignore[arg-type]

    assert not truncates(rows(temperature=0.7))
    assert truncates(rows(top_k=3)) and truncates(rows(top_p=0.9)) and truncates(rows(min_p=0.1))
