from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.algorithms.rows import NAN, near
from verl.algorithms.bradley_terry import BradleyTerry, BradleyTerryConfig, last_scores
from verl.common.errors import MissingField, ShapeError


def model(centre_coef: float = 0.0) -> BradleyTerry:
    return BradleyTerry(BradleyTerryConfig(centre_coef=centre_coef))


def batch() -> tuple[Tensor, dict[str, Tensor]]:
    """Pairs 4 (rows 0 and 2) and 9 (rows 3 and 1), and pair 6 whose rejected row 5 has no token. Last scores: 2, 1, -1,
    1, 7. Everything that isn't a row's last score is NaN, but one before the last of row 0."""
    scores = torch.tensor(
        [[50.0, 2.0, NAN], [1.0, NAN, NAN], [NAN, NAN, -1.0], [1.0, NAN, NAN], [NAN, 7.0, NAN], [NAN, NAN, NAN]]
    )
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 0]]).bool()
    columns = {
        "response_mask": mask,
        "pair_id": torch.tensor([4, 9, 4, 9, 6, 6]),
        "is_chosen": torch.tensor([1, 0, 0, 1, 1, 0]).bool(),
    }
    return scores.requires_grad_(), columns


def test_by_hand_on_ragged_pairs() -> None:
    """Margins 3 and 0: losses ln(1 + e^-3) = 0.048587 and ln 2; a tie is no win."""
    scores, columns = batch()
    loss = model().score_loss(scores, columns)
    assert loss.sum.item() == pytest.approx(0.048587 + 0.693147, abs=1e-6) and loss.count.item() == 2
    found = {name: (total / count).item() for name, (total, count) in loss.metrics.items()}
    assert found == pytest.approx(
        {
            "reward_model/loss": 0.370867, "reward_model/accuracy": 0.5, "reward_model/margin": 1.5,
            "reward_model/chosen_score": 1.5, "reward_model/rejected_score": 0.0,
        },
        abs=1e-6,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss.sum / loss.count, scores)
    push = 1 / (1 + math.exp(3)) / 2
    near(gradient, [[0, -push, 0], [0.25, 0, 0], [0, 0, push], [-0.25, 0, 0], [0, 0, 0], [0, 0, 0]])


def test_the_level_of_scores_is_held_on_request() -> None:
    """Sums 1 and 2 of the two pairs: 0.1 * (1 + 4), and its gradient 0.1 * 2 * sum on both rows."""
    scores, columns = batch()
    plain, centred = model().score_loss(scores, columns), model(0.1).score_loss(scores, columns)
    assert (centred.sum - plain.sum).item() == pytest.approx(0.5)
    (gradient,) = torch.autograd.grad(centred.sum - plain.sum, scores)
    near(gradient, [[0, 0.2, 0], [0.4, 0, 0], [0, 0, 0.2], [0.4, 0, 0], [0, 0, 0], [0, 0, 0]])


def test_untrained_scores_lose_ln_2_and_pull_both_ways() -> None:
    scores = torch.zeros(2, 1, requires_grad=True)
    mask = torch.ones(2, 1, dtype=torch.bool)
    columns = {"response_mask": mask, "pair_id": torch.zeros(2, dtype=torch.int64), "is_chosen": torch.tensor([1, 0])}
    loss = model().score_loss(scores, columns)
    assert loss.sum.item() == pytest.approx(math.log(2))
    near(torch.autograd.grad(loss.sum, scores)[0], [[-0.5], [0.5]])


def test_cutting_between_pairs_changes_nothing() -> None:
    scores, columns = batch()
    whole = model(0.01).score_loss(scores, columns)
    pieces = [
        model(0.01).score_loss(scores[rows], {name: column[rows] for name, column in columns.items()})
        for rows in ([0, 2], [4, 5], [1, 3], [])
    ]
    assert sum(p.sum.item() for p in pieces) == pytest.approx(whole.sum.item())
    assert sum(p.count for p in pieces) == whole.count == 2
    cut, together = (torch.autograd.grad(s, scores)[0] for s in (torch.stack([p.sum for p in pieces]).sum(), whole.sum))
    torch.testing.assert_close(cut, together)


def test_huge_margins_stay_finite() -> None:
    scores = torch.tensor([[-300.0], [300.0]], requires_grad=True)
    columns = {"response_mask": torch.ones(2, 1).bool(), "pair_id": torch.zeros(2), "is_chosen": torch.tensor([1, 0])}
    loss = model().score_loss(scores, columns)
    assert loss.sum.item() == pytest.approx(600)
    near(torch.autograd.grad(loss.sum, scores)[0], [[-1], [1]])


def test_what_it_needs_and_refuses() -> None:
    assert model().needs == frozenset() and model().trains == ("reward_model",)
    scores, columns = batch()
    for name in columns:
        with pytest.raises(MissingField, match=name):
            model().score_loss(scores, {n: c for n, c in columns.items() if n != name})
    with pytest.raises(ShapeError, match=r"\[6, 3\].*\[6, 2\]"):
        last_scores(scores, columns["response_mask"][:, :2])
    last, has = last_scores(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool))
    assert (last.tolist(), has.tolist()) == ([0, 0], [False, False])
