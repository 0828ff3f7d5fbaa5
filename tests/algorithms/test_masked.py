import pytest
import torch

from tests.algorithms.rows import NAN, near
from verl.algorithms.masked import masked_max, masked_mean, masked_min, masked_sum, masked_var, whiten

X = torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN]])
M = torch.tensor([[True, True, False], [True, False, False]])


def test_statistics_read_only_the_mask():
    near(masked_sum(X, M), 9.0)
    near(masked_sum(X, M, 1), [3.0, 6.0])
    near(masked_mean(X, M), 3.0)
    near(masked_mean(X, M, 1), [1.5, 6.0])
    near(masked_var(X, M), 7.0)  # (4 + 1 + 9) / 2
    near(masked_max(X, M), 6.0)
    near(masked_min(X, M), 1.0)


def test_whitening_by_hand_and_zero_outside():
    near(whiten(X, M), [[-2 / 7**0.5, -1 / 7**0.5, 0], [3 / 7**0.5, 0, 0]])


@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 0)])
def test_an_empty_mask_gives_numbers(shape):
    x, m = torch.full(shape, NAN), torch.zeros(shape, dtype=torch.bool)
    near(masked_mean(x, m), 0.0)
    near(masked_var(x, m), 0.0)
    assert masked_max(x, m) == -torch.inf and masked_min(x, m) == torch.inf
    assert torch.equal(whiten(x, m), torch.zeros(shape))


@pytest.mark.parametrize("value", [0.7, 0.1, 0.35, 1.0, -1e6, 1e-30])
@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_equal_values_whiten_to_exactly_zero(value, count):
    assert torch.equal(
        whiten(torch.full((1, count), value), torch.ones(1, count, dtype=torch.bool)), torch.zeros(1, count)
    )


def test_values_apart_by_rounding_count_as_equal():
    x = torch.tensor([[0.7, torch.nextafter(torch.tensor(0.7), torch.tensor(1.0)), 0.7]])
    assert torch.equal(whiten(x, torch.ones(1, 3, dtype=torch.bool)), torch.zeros(1, 3))
    assert whiten(torch.tensor([[0.7, 0.7001]]), torch.ones(1, 2, dtype=torch.bool)).abs().min() > 0.1
