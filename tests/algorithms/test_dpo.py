"""Values marked TRL are those of TRL 1.16.0's own loss function on the same log-probs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.judged import judged, three_pairs
from tests.algorithms.rows import NAN, near
from verl.algorithms.base import Loss
from verl.algorithms.dpo import DPO, DPOConfig
from verl.common.errors import ConfigError, MissingField, ShapeError


def loss_of(log_probs: Tensor, columns: dict[str, Tensor], **keys: Any) -> Loss:
    return DPO(DPOConfig(**keys)).actor_loss(log_probs, None, columns)


def metric(loss: Loss, name: str) -> float:
    total, count = loss.metrics[f"actor/{name}"]
    return float(total / count)


@pytest.mark.parametrize(
    ("keys", "trl"),
    [
        ({"beta": 0.1}, 0.6589530110),
        ({"beta": 0.5}, 0.5380368233),
        ({"beta": 0.1, "loss": "ipo"}, 20.7247467041),
        ({"beta": 0.5, "loss": "ipo"}, 0.5691898465),
        ({"beta": 0.5, "label_smoothing": 0.1}, 0.5730368296),
    ],
)
def test_losses_are_those_of_trl(keys: dict[str, Any], trl: float) -> None:
    loss = loss_of(*three_pairs(), **keys)
    near(loss.sum / loss.count, trl)
    assert float(loss.count) == 3
    near(torch.tensor(metric(loss, "loss")), trl)


@pytest.mark.parametrize(
    ("kind", "by_row"),
    [
        ("sigmoid", [-0.0729706, -0.0581075, -0.0760602, 0.0729706, 0.0581075, 0.0760602]),
        ("ipo", [-0.2777778, 0.1666667, -0.1625, 0.1851852, -0.1666667, 0.325]),
    ],
)
def test_gradients_are_those_of_trl_and_reach_no_padding(kind: str, by_row: list[float]) -> None:
    log_probs, columns = three_pairs()
    loss = loss_of(log_probs, columns, beta=0.5, loss=kind)
    (loss.sum / loss.count).backward()
    assert log_probs.grad is not None
    near(log_probs.grad, torch.tensor(by_row)[:, None] * columns["response_mask"])


def test_a_pair_by_hand() -> None:
    """Policy -4 and -7, reference -5 and -6, beta 0.1: margin 0.1 * (1 - -1), loss -log sigmoid(0.2)."""
    loss = loss_of(*judged([[-4.0], [-7.0]], [[-5.0], [-6.0]], [True, False], [0, 0]))
    near(loss.sum, 0.598139)
    found = {name: metric(loss, name) for name in ("margin", "accuracy", "chosen_reward", "rejected_reward")}
    assert found == pytest.approx({"margin": 0.2, "accuracy": 1.0, "chosen_reward": 0.1, "rejected_reward": -0.1})
    assert metric(loss, "chosen_log_prob") == -4 and metric(loss, "rejected_log_prob") == -7


def test_sums_run_over_the_response_alone() -> None:
    """A uniform policy over ten words: two tokens against three, whatever the prompt's four would add."""
    word = -math.log(10)
    loss = loss_of(*judged([[word] * 2, [word] * 3], [[0.0] * 2, [0.0] * 3], [True, False], [0, 0]))
    near(torch.tensor(metric(loss, "chosen_log_prob")), -4.605170)
    near(torch.tensor(metric(loss, "rejected_log_prob")), -6.907755)


def test_a_tie_is_no_win_and_an_equal_pair_has_no_gradient() -> None:
    rows = [[-1.3, -0.7], [-1.3, -0.7]]
    log_probs, columns = judged(rows, rows, [True, False], [5, 5])
    loss = loss_of(log_probs, columns)
    near(loss.sum, math.log(2))
    assert metric(loss, "margin") == 0 and metric(loss, "accuracy") == 0
    weight = torch.tensor(1.0, requires_grad=True)
    again = loss_of(weight * log_probs.detach(), columns)
    again.sum.backward()
    assert weight.grad is not None and abs(float(weight.grad)) < 1e-8


def test_a_margin_within_rounding_is_a_tie() -> None:
    noisy = [[-101.3 + 4e-6], [-55.0]]
    assert metric(loss_of(*judged(noisy, [[-101.3], [-55.0]], [True, False], [0, 0])), "accuracy") == 0
    clear = [[-101.3 + 4e-2], [-55.0]]
    assert metric(loss_of(*judged(clear, [[-101.3], [-55.0]], [True, False], [0, 0])), "accuracy") == 1


def test_pairs_come_in_any_order_and_any_cut() -> None:
    log_probs, columns = three_pairs()
    whole = loss_of(log_probs, columns, beta=0.5)
    order = torch.tensor([4, 2, 0, 5, 3, 1])
    mixed = loss_of(log_probs[order], {name: column[order] for name, column in columns.items()}, beta=0.5)
    near(mixed.sum, whole.sum)
    cut = [torch.tensor([0, 3]), torch.tensor([1, 2, 4, 5])]
    parts = [loss_of(log_probs[rows], {n: c[rows] for n, c in columns.items()}, beta=0.5) for rows in cut]
    near(sum((part.sum for part in parts), torch.tensor(0.0)), whole.sum)
    for name, (total, count) in whole.metrics.items():
        near(torch.stack([part.metrics[name][0] for part in parts]).sum(), total)
        near(torch.stack([part.metrics[name][1] for part in parts]).sum(), count)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_a_pair_with_an_empty_answer_takes_no_part(kind: str) -> None:
    rows = [[-4.0], [-7.0], [-1.0], []]
    log_probs, columns = judged(rows, [[-5.0], [-6.0], [-1.5], []], [True, False, True, False], [0, 0, 1, 1])
    with_empty = loss_of(log_probs, columns, loss=kind)
    alone = loss_of(*judged(rows[:2], [[-5.0], [-6.0]], [True, False], [0, 0]), loss=kind)
    near(with_empty.sum, alone.sum)
    assert float(with_empty.count) == 1
    with_empty.sum.backward()
    assert log_probs.grad is not None and bool(log_probs.grad.isfinite().all())
    assert log_probs.grad[2:].abs().sum() == 0


def test_no_pairs_make_no_loss() -> None:
    loss = loss_of(torch.zeros(0, 0, requires_grad=True), {
        "response_mask": torch.zeros(0, 0, dtype=torch.bool), "ref_log_probs": torch.zeros(0, 0),
        "is_chosen": torch.zeros(0, dtype=torch.bool), "pair_id": torch.zeros(0, dtype=torch.int64),
    })  # fmt: skip
    assert float(loss.sum.detach()) == 0 and float(loss.count) == 0


def test_masked_tokens_inside_an_answer_count_nowhere() -> None:
    log_probs, columns = judged([[-4.0, NAN], [-7.0, -50.0]], [[-5.0, NAN], [-6.0, NAN]], [True, False], [0, 0])
    columns["response_mask"][:, 1] = False
    near(loss_of(log_probs, columns).sum, 0.598139)


def test_a_column_that_is_missing_and_a_row_without_partner_are_named() -> None:
    log_probs, columns = three_pairs()
    for name in ("ref_log_probs", "pair_id", "is_chosen", "response_mask"):
        with pytest.raises(MissingField, match=name):
            loss_of(log_probs, {key: column for key, column in columns.items() if key != name})
    with pytest.raises(ShapeError, match="one chosen and one rejected"):
        loss_of(log_probs[:5], {name: column[:5] for name, column in columns.items()})


@pytest.mark.parametrize("wrong", [{"beta": 0}, {"label_smoothing": 0.5}, {"label_smoothing": -0.1}, {"loss": "hinge"}])
def test_values_that_make_no_loss_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        DPOConfig.parse(wrong, "algorithm")


def test_smoothing_under_ipo_is_named() -> None:
    assert DPOConfig(loss="ipo", label_smoothing=0.1).ineffective_keys()[0].startswith("label_smoothing")
    assert DPOConfig(label_smoothing=0.1).ineffective_keys() == []
