import pytest
import torch

from tests.algorithms.rows import NAN, near
from verl.algorithms.gae import gae
from verl.common.errors import ShapeError


def mask_of(*rows: str) -> torch.Tensor:
    return torch.tensor([[c == "1" for c in row] for row in rows])


def test_by_hand():
    # g2 = 1 - .3 = .7; g1 = .5*.3 - .2 + .25*.7 = .125; g0 = .5*.2 - .1 + .25*.125 = .03125
    values, rewards = torch.tensor([[0.1, 0.2, 0.3]]), torch.tensor([[0.0, 0.0, 1.0]])
    advantages, returns = gae(values, rewards, mask_of("111"), gamma=0.5, gae_lambda=0.5)
    near(advantages, [[0.03125, 0.125, 0.7]])
    near(returns, [[0.13125, 0.325, 1.0]])


def test_lambda_one_is_the_return_minus_the_value():
    values, rewards = torch.tensor([[5.0, -3.0, 2.0]]), torch.tensor([[0.5, 0.0, 1.0]])
    advantages, returns = gae(values, rewards, mask_of("111"), gamma=1, gae_lambda=1)
    near(returns, [[1.5, 1.0, 1.0]])
    near(advantages, [[-3.5, 4.0, -1.0]])


def test_tool_tokens_are_stepped_over():
    """A row with tool output equals the row without it, wherever the tool output stands and whatever it holds."""
    plain = gae(
        torch.tensor([[0.1, 0.2, 0.3]]), torch.tensor([[0.1, 0.0, 1.0]]), mask_of("111"), gamma=0.9, gae_lambda=0.8
    )
    values = torch.tensor([[NAN, 0.1, NAN, NAN, 0.2, 0.3, NAN]])
    rewards = torch.tensor([[NAN, 0.1, 9.0, NAN, 0.0, 1.0, torch.inf]])
    mask = mask_of("0100110")
    for got, want in zip(gae(values, rewards, mask, gamma=0.9, gae_lambda=0.8), plain, strict=True):
        near(got[mask], want[0])
        assert torch.equal(got[~mask], torch.zeros(4))


def test_rows_do_not_depend_on_their_neighbours():
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 7, 0, 3]
    values, rewards = (torch.randn(4, 7, generator=generator) for _ in range(2))
    mask = torch.arange(7)[None] < torch.tensor(lengths)[:, None]
    together, _ = gae(values, rewards, mask, gamma=0.9, gae_lambda=0.7)
    for i, n in enumerate(lengths):
        alone, _ = gae(values[i : i + 1, :n], rewards[i : i + 1, :n], mask[i : i + 1, :n], gamma=0.9, gae_lambda=0.7)
        near(together[i, :n], alone[0])
    assert torch.equal(together[~mask], torch.zeros(int((~mask).sum())))


@pytest.mark.parametrize("shape", [(0, 0), (2, 0), (0, 3), (1, 1)])
def test_degenerate_shapes(shape):
    advantages, returns = gae(torch.zeros(shape), torch.ones(shape), torch.ones(shape).bool(), gamma=1, gae_lambda=1)
    assert torch.equal(advantages, torch.ones(shape)) and torch.equal(returns, torch.ones(shape))


def test_no_gradient_comes_out():
    values = torch.zeros(1, 2, requires_grad=True)
    advantages, returns = gae(values, torch.ones(1, 2), mask_of("11"), gamma=1, gae_lambda=1)
    assert not advantages.requires_grad and not returns.requires_grad


def test_shapes_must_agree():
    with pytest.raises(ShapeError, match=r"\[1, 2\].*\[1, 3\]"):
        gae(torch.zeros(1, 2), torch.zeros(1, 3), mask_of("11"), gamma=1, gae_lambda=1)
