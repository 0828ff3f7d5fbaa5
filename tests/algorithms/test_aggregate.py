import pytest
import torch

from tests.algorithms.rows import NAN, near
from verl.algorithms.aggregate import aggregate, for_metric
from verl.algorithms.base import Loss
from verl.common.errors import ConfigError, ShapeError

LOSSES = torch.tensor([[1.0, 1.0, 1.0, 1.0], [4.0, NAN, NAN, NAN], [NAN] * 4])
MASK = torch.tensor([[True] * 4, [True, False, False, False], [False] * 4])


@pytest.mark.parametrize(
    ("how", "total", "count"),
    [
        ("token-mean", 8.0, 5.0),
        ("token-sum", 8.0, 0.0),
        ("seq-mean-token-mean", 5.0, 2.0),
        ("seq-mean-token-sum", 8.0, 2.0),
        ("seq-mean-token-sum-norm", 8.0, 20.0),
    ],
)
def test_sum_and_count(how, total, count):
    got = aggregate(LOSSES, MASK, how, norm_tokens=10)
    near(got[0], total)
    near(got[1], count)


CUTS = [[[0, 1, 2]], [[0], [1], [2]], [[2, 0], [1]], [[1], [2], [0]]]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    ("how", "value"),
    [
        ("token-mean", 1.6),
        ("token-sum", 8.0),
        ("seq-mean-token-mean", 2.5),
        ("seq-mean-token-sum", 4.0),
        ("seq-mean-token-sum-norm", 0.4),
    ],
)
def test_loss_and_gradient_do_not_depend_on_the_cut(cut, how, value):
    """The losses are the weight times themselves, so the gradient equals the loss; widths follow the pieces."""
    weight = torch.tensor(1.0, requires_grad=True)
    total, count, gradient = torch.tensor(0.0), torch.tensor(0.0), torch.tensor(0.0)
    for piece in cut:
        width = int(MASK[piece].sum(1).max())
        mask = MASK[piece][:, :width]
        values = torch.where(mask, LOSSES[piece][:, :width], 7.0) * weight
        part, n = aggregate(values, mask, how, norm_tokens=10)
        total, count = total + part.detach(), count + n
        gradient = gradient + torch.autograd.grad(part, weight)[0]
    near(total / Loss.divisor(count), value)
    near(gradient / Loss.divisor(count), value)


def test_nothing_to_count():
    for shape in [(2, 3), (1, 0), (0, 0)]:
        total, count = aggregate(torch.full(shape, NAN), torch.zeros(shape).bool(), "seq-mean-token-mean")
        near(total, 0.0)
        near(count, 0.0)
        near(Loss.divisor(count), 1.0)


def test_mistakes_are_named():
    with pytest.raises(AssertionError, match="longest response"):
        aggregate(LOSSES, MASK, "seq-mean-token-sum-norm")
    with pytest.raises(ConfigError, match=r"loss_aggregation.*'mean'.*token-mean"):
        aggregate(LOSSES, MASK, "mean")
    with pytest.raises(ShapeError):
        aggregate(LOSSES, MASK[:, :2], "token-mean")


def test_a_plain_sum_is_logged_as_a_mean():
    assert for_metric("token-sum") == "token-mean" and for_metric("seq-mean-token-sum") == "seq-mean-token-sum"
