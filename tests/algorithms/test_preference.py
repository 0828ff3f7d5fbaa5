from __future__ import annotations

import pytest
import torch

from tests.algorithms.judged import judged
from tests.algorithms.rows import NAN, near
from verl.algorithms.preference import entropy_metric, is_win, log_ratios, loss_of, mean_of
from verl.common.errors import ShapeError


def test_ratios_are_sums_over_each_rows_own_tokens() -> None:
    log_probs, columns = judged([[-1.0, -2.0], [-3.0], []], [[-0.5, -0.25], [-4.0], []], [True, False, True])
    found = log_ratios(log_probs, columns)
    near(found.ratio, [-2.25, 1.0, 0.0])
    near(found.log_prob, [-3.0, -3.0, 0.0])
    assert found.tokens.tolist() == [2, 1, 0]
    assert not found.log_prob.requires_grad and found.ratio.requires_grad


def test_columns_of_another_shape_are_refused() -> None:
    log_probs, columns = judged([[-1.0, -2.0]], [[-0.5, -0.25]], [True])
    with pytest.raises(ShapeError, match="log_probs"):
        log_ratios(log_probs[:, :1], columns)


def test_a_mean_is_over_what_counts() -> None:
    values, counts = torch.tensor([1.0, NAN, 3.0]), torch.tensor([True, False, True])
    assert [float(x) for x in mean_of(values, counts)] == [4.0, 2.0]
    loss = loss_of(values, counts, {})
    assert float(loss.sum) == 4 and float(loss.count) == 2 and float(loss.metrics["actor/loss"][0]) == 4


def test_a_win_is_above_rounding() -> None:
    margin = torch.tensor([1e-6, 1.0, 0.0, -1.0])
    assert is_win(margin, torch.full((4,), 1e-5)).tolist() == [False, True, False, False]


def test_entropy_is_a_mean_over_tokens() -> None:
    _, columns = judged([[-1.0, -2.0], [-3.0]], [[0.0, 0.0], [0.0]], [True, False])
    total, count = entropy_metric(torch.tensor([[1.0, 2.0], [3.0, NAN]]), columns)["actor/entropy"]
    assert float(total) == 6 and float(count) == 3
    assert entropy_metric(None, columns) == {}
