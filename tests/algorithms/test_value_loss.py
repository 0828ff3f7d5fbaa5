import pytest
import torch

from tests.algorithms.rows import near
from verl.algorithms.value_loss import clipped_value_loss


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss", "gradient", "is_clipped"),
    [
        (1.0, 1.0, 3.0, 0.5, 2.0, -2.0, False),
        (2.0, 1.0, 3.0, 0.5, 1.125, 0.0, True),  # moved by 1, held at 1.5: (1.5 - 3)^2 / 2
        (2.0, 1.0, 0.0, 0.5, 2.0, 2.0, False),  # moved away from the target: full gradient
        (2.0, 1.0, 3.0, None, 0.5, -1.0, False),
        (3.0, 3.0, 3.0, 0.5, 0.0, 0.0, False),
    ],
)
def test_by_hand(value, old, target, clip, loss, gradient, is_clipped):
    v = torch.tensor([[value]], requires_grad=True)
    got, clipped = clipped_value_loss(v, torch.tensor([[old]]), torch.tensor([[target]]), clip)
    near(got.detach(), [[loss]])
    near(torch.autograd.grad(got.sum(), v)[0], [[gradient]])
    assert bool(clipped) == is_clipped


def test_rounding_is_no_clip() -> None:
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 1000, 7, generator=generator)
    _, is_clipped = clipped_value_loss(values, old, returns, 1000.0)
    assert not is_clipped.any()
