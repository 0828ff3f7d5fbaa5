from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.algorithms.rows import NAN, near
from verl.algorithms.sft import SFT, SFTConfig
from verl.common.errors import MissingField, ShapeError


def sft(**keys: object) -> SFT:
    return SFT(SFTConfig(**keys))  # type: ignore[arg-type]


def rows() -> tuple[Tensor, Tensor]:
    """Answers of 3, 1 and no tokens and two turns with another's between; what isn't learned holds NaN."""
    log_probs = [[-1.0, -2.0, -3.0, NAN], [-4.0, NAN, NAN, NAN], [NAN] * 4, [-1.0, NAN, NAN, -7.0]]
    values = torch.tensor(log_probs)
    return values.clone().requires_grad_(), values.isfinite()


@pytest.mark.parametrize(
    ("how", "total", "count", "gradient"),
    [
        ("token-mean", 18, 6, [-1 / 6] * 6),
        ("seq-mean-token-mean", 2 + 4 + 4, 3, [-1 / 9] * 3 + [-1 / 3] + [-1 / 6] * 2),
    ],
)
def test_by_hand_on_ragged_rows(how: str, total: float, count: float, gradient: list[float]) -> None:
    log_probs, mask = rows()
    loss = sft(loss_aggregation=how).actor_loss(log_probs, None, {"response_mask": mask})
    assert (loss.sum.item(), loss.count.item()) == (total, count)
    assert [value.item() for value in loss.metrics["actor/loss"]] == [total, count]
    assert loss.metrics["actor/learned_tokens/sum"][0].item() == 6
    (found,) = torch.autograd.grad(loss.sum / loss.count, log_probs)
    near(found[mask], gradient)
    assert not found[~mask].any()


def test_a_uniform_model_loses_ln_of_the_vocabulary() -> None:
    """H07: prompt 10 11 12, answer 20 21 2 over 50 tokens: three labels; then label k costs k: 20 + 21 + 2."""
    mask = torch.ones(1, 3, dtype=torch.bool)
    loss = sft().actor_loss(torch.full((1, 3), -math.log(50)), None, {"response_mask": mask})
    assert (loss.sum / loss.count).item() == pytest.approx(3.912023, abs=1e-6) and loss.count.item() == 3
    loss = sft().actor_loss(-torch.tensor([[20.0, 21.0, 2.0]]), None, {"response_mask": mask})
    assert loss.sum.item() == 43


def test_cutting_the_rows_changes_neither_loss_nor_gradient() -> None:
    """H04: losses 1 1 1 1 and 4 of one weight: 1.6 over tokens, 2.5 over rows, however they are cut."""
    values = torch.tensor([[-1.0] * 4, [-4.0, 9.0, 9.0, 9.0]])
    for how, expected in (("token-mean", 1.6), ("seq-mean-token-mean", 2.5)):
        for cut in ([[0, 1]], [[0], [1]], [[1], [0], []]):
            weight = torch.ones((), requires_grad=True)
            pieces = [
                sft(loss_aggregation=how).actor_loss(weight * values[i], None, {"response_mask": values[i] < 0})
                for i in cut
            ]
            mean = torch.stack([p.sum for p in pieces]).sum() / torch.stack([p.count for p in pieces]).sum()
            (gradient,) = torch.autograd.grad(mean, weight)
            assert mean.item() == pytest.approx(expected) and gradient.item() == pytest.approx(expected)


def test_the_entropy_is_measured_and_not_learned() -> None:
    log_probs, mask = rows()
    entropy = torch.where(mask, 0.5, NAN).requires_grad_()
    loss = sft().actor_loss(log_probs, entropy, {"response_mask": mask})
    total, count = loss.metrics["actor/entropy"]
    assert (total.item(), count.item()) == (3, 6)
    assert torch.autograd.grad(loss.sum, entropy, allow_unused=True) == (None,)


def test_what_it_needs_and_refuses() -> None:
    assert sft().needs == frozenset() and sft().trains == ("actor",) and SFT.family == "supervised"
    with pytest.raises(MissingField, match="response_mask"):
        sft().actor_loss(torch.zeros(1, 2), None, {})
    with pytest.raises(ShapeError, match=r"\[1, 2\].*\[1, 3\]"):
        sft().actor_loss(torch.zeros(1, 2), None, {"response_mask": torch.ones(1, 3, dtype=torch.bool)})
