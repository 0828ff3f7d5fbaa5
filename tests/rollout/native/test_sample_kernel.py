"""The sampling kernels against ``sampler.sample`` and ``advance.advance``."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from tests.rollout.native.kernels import DEVICE
from verl.rollout.native.advance import Outputs, advance
from verl.rollout.native.row_state import RowState
from verl.rollout.native.sample_kernel import advance_step, sample_step
from verl.rollout.native.sampler import sample

quiet = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # of the interpreter


def rows(count: int, stop_ids: int = 2, temperature: float = 1.0, left: int = 5) -> RowState:
    """Running rows of different seeds and indices."""
    state = RowState.empty(count, stop_ids, 3, DEVICE)
    each = torch.arange(count, device=DEVICE)
    state.tokens.fill_(1)
    state.positions.copy_(each + 10)
    state.left.fill_(left)
    state.index.copy_(each % 7)
    state.seed_low.copy_(each * 0x2545F491)
    state.seed_high.copy_(each * -77)
    state.temperature.fill_(temperature)
    return state


def logits(count: int, vocab: int, std: float = 2.0) -> Tensor:
    return (torch.randn(count, vocab, generator=torch.Generator().manual_seed(0)) * std).to(DEVICE)


def check(given: Tensor, state: RowState, tempered_of: Tensor | None = None, **settings: float) -> Tensor:
    """A step equals sample and advance, of ``tempered_of`` if the kernel is to make it of ``given``; the tokens."""
    twin = copy.deepcopy(state)
    out, expected = Outputs.empty(3, len(given), DEVICE), Outputs.empty(3, len(given), DEVICE)
    out.count.fill_(1)
    expected.count.fill_(1)
    advance(*sample((given if tempered_of is None else tempered_of).float(), twin, truncates=False), twin, expected)
    sample_step(given, state, out, **settings)
    assert out.tokens.tolist() == expected.tokens.tolist()
    torch.testing.assert_close(out.log_probs, expected.log_probs, atol=5e-6, rtol=2e-6, equal_nan=True)
    assert state.columns.tolist() == twin.columns.tolist()
    return out.tokens[1]


@pytest.mark.parametrize("vocab", [1, 2, 50, 1023, 1024, 5000])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_one_step_equals_the_sampler(vocab: int, temperature: float) -> None:
    check(logits(3, vocab), rows(3, temperature=temperature))


def test_many_draws_are_those_of_the_sampler() -> None:
    tokens = check(logits(1, 200, std=0.5).expand(100, -1), rows(100))
    assert len(tokens.unique()) > 50


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_and_strided_rows(dtype: torch.dtype) -> None:
    check(logits(4, 3000).to(dtype)[:, :2500], rows(4))
    check(logits(4, 3000).to(dtype)[::2, 8:], rows(2, temperature=0.0))


def test_scale_and_softcap_come_before_the_temperature() -> None:
    given = logits(3, 300, std=20.0)
    check(given, rows(3, temperature=0.5), given * 0.25, scale=0.25)
    check(given, rows(3, temperature=0.5), 5.0 * torch.tanh(given * 0.25 / 5.0), scale=0.25, softcap=5.0)


def test_large_logits_neither_overflow_nor_vanish() -> None:
    given = logits(4, 1500, std=1.0)
    given[0] += 1e4
    given[1] -= 1e4
    given[2, ::2] = -math.inf
    given[3, :1400] = -math.inf  # a whole chunk
    check(given, rows(4))


def test_greedy_ties_go_to_the_lower_id_within_and_across_blocks() -> None:
    given = torch.zeros(3, 4000, device=DEVICE)
    given[0, [3999, 1500, 1501]] = 1.0
    given[1, [2047, 1023]] = 1.0
    assert check(given, rows(3, temperature=0.0)).tolist() == [1500, 1023, 0]


def test_stop_ids_cannot_be_drawn_below_the_minimum() -> None:
    given = torch.zeros(3, 1500, device=DEVICE)
    given[:, [4, 1200]] = 9.0
    for temperature in (0.0, 1.0):
        state = rows(3, temperature=temperature)
        state.stop_ids.copy_(torch.tensor([[4, 1200], [4, -1], [1200, 4]]))
        state.min_new.copy_(torch.tensor([1, 2, 2]))  # of rows at indices 0, 1 and 2
        tokens = check(given, state).tolist()
        assert tokens[0] not in (4, 1200) and tokens[1] == 1200 and tokens[2] in (4, 1200)
        assert state.left.tolist() == [4, 4, 0]


def test_rows_end_by_stop_id_and_length_and_others_stay() -> None:
    given = torch.full((4, 100), -9.0, device=DEVICE)
    given[:, 42] = 9.0
    state = rows(4, temperature=0.0)
    state.left.copy_(torch.tensor([5, 1, 0, 5]))
    state.positions[2] = -1
    state.stop_ids[0] = torch.tensor([7, 42])
    assert check(given, state).tolist() == [42, 42, -1, 42]
    assert state.left.tolist() == [0, 0, 0, 4] and state.positions.tolist() == [-1, -1, -1, 14]


def test_without_stop_ids() -> None:
    check(logits(2, 100), rows(2, stop_ids=0))


@quiet
@pytest.mark.parametrize("bad", [[5], [0, 1100], range(1200)])
def test_a_nan_shows_in_the_log_prob_and_the_token_stays_an_id(bad: list[int]) -> None:
    given = logits(2, 1200)
    given[0, list(bad)] = math.nan
    state, out = rows(2), Outputs.empty(1, 2, DEVICE)
    sample_step(given, state, out)
    assert math.isnan(out.log_probs[0, 0]) and 0 <= int(out.tokens[0, 0]) < 1200
    assert math.isfinite(out.log_probs[0, 1])


def test_a_draw_does_not_depend_on_the_neighbours() -> None:
    given, state = logits(40, 2500), rows(40)
    alone = copy.deepcopy(state.at(torch.tensor([33], device=DEVICE)))
    tokens = check(given, state)
    assert check(given[33:34], alone).tolist() == tokens[33:34].tolist()


def test_advance_alone_equals_its_definition() -> None:
    state = rows(6, stop_ids=3)
    state.left.copy_(torch.tensor([3, 1, 0, 4, 4, 4]))
    state.stop_ids.copy_(torch.tensor([[5, -1, -1]]).expand(6, -1))
    state.min_new.fill_(5)  # rows are at indices 0 to 5: the last two have it
    twin = copy.deepcopy(state)
    tokens, log_probs = torch.tensor([4, 4, 4, 5, 5, 6], device=DEVICE), torch.arange(-6.0, 0.0, device=DEVICE)
    out, expected = Outputs.empty(2, 6, DEVICE), Outputs.empty(2, 6, DEVICE)
    advance_step(tokens, log_probs, state, out)
    advance(tokens, log_probs, twin, expected)
    assert state.columns.tolist() == twin.columns.tolist() and state.left.tolist() == [2, 0, 0, 3, 0, 3]
    assert out.tokens.tolist() == expected.tokens.tolist() and out.log_probs.tolist() == expected.log_probs.tolist()


@pytest.mark.parametrize("vocab", [13, 2053])
@pytest.mark.parametrize("temperature", [2.0, math.inf])
def test_nothing_right_of_the_vocabulary_counts(vocab: int, temperature: float) -> None:
    """Infinity is what a temperature beyond float32 becomes."""
    given = logits(6, vocab)
    check(given, rows(6, temperature=temperature))
    check(given, rows(6, temperature=temperature), 0.5 * torch.tanh(given / 0.5), softcap=0.5)
