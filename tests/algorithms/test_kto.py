"""Values marked TRL are those of TRL 1.16.0's own loss function on the same log-probs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.judged import CHOSEN, REF_CHOSEN, REF_REJECTED, REJECTED, judged
from tests.algorithms.rows import near
from verl.algorithms.base import Loss
from verl.algorithms.kto import KTO, KTOConfig
from verl.common.errors import ConfigError, MissingField

ROWS = [CHOSEN[0], REJECTED[0], CHOSEN[1], REJECTED[2], CHOSEN[2]]
REF = [REF_CHOSEN[0], REF_REJECTED[0], REF_CHOSEN[1], REF_REJECTED[2], REF_CHOSEN[2]]
LABELS = [True, False, True, False, True]
KL = (0.5 + 0.5 + 0.25 + 0.0 + 0.75) / 5
"""Mean log-ratio of the five mismatched answers that TRL was given."""


def five(kl: float = KL) -> tuple[Tensor, dict[str, Tensor]]:
    return judged(ROWS, REF, LABELS, kl=kl)


def loss_of(log_probs: Tensor, columns: dict[str, Tensor], **keys: Any) -> Loss:
    return KTO(KTOConfig(**keys)).actor_loss(log_probs, None, columns)


@pytest.mark.parametrize(
    ("keys", "kl", "trl"),
    [
        ({"beta": 0.1}, KL, 0.4965027869),
        ({"beta": 0.5}, KL, 0.4828431010),
        ({"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.5}, KL, 0.5501407981),
        ({"beta": 0.5}, 0.0, 0.4726761878),
    ],
)
def test_losses_are_those_of_trl(keys: dict[str, Any], kl: float, trl: float) -> None:
    loss = loss_of(*five(kl), **keys)
    near(loss.sum / loss.count, trl)
    assert float(loss.count) == 5


def test_gradients_are_those_of_trl_and_reach_neither_padding_nor_the_kl() -> None:
    log_probs, columns = five()
    loss = loss_of(log_probs, columns, beta=0.5, desirable_weight=1.5, undesirable_weight=0.5)
    (loss.sum / loss.count).backward()
    by_row = torch.tensor([-0.0371275, 0.0118879, -0.0374473, 0.0124824, -0.0374064])
    assert log_probs.grad is not None
    near(log_probs.grad, by_row[:, None] * columns["response_mask"])


def test_one_answer_by_hand() -> None:
    """r = 1, z = 0.5, beta 0.1: 1 - sigmoid(0.05) if desirable, 1 - sigmoid(-0.05) if not."""
    for label, sign in ((True, 1), (False, -1)):
        loss = loss_of(*judged([[-4.0]], [[-5.0]], [label], kl=0.5))
        near(loss.sum, 1 - 1 / (1 + math.exp(-sign * 0.05)))


def test_any_cut_gives_the_same_sums() -> None:
    log_probs, columns = five()
    whole = loss_of(log_probs, columns)
    parts = [loss_of(log_probs[s], {n: c[s] for n, c in columns.items()}) for s in (slice(0, 1), slice(1, 5))]
    near(parts[0].sum + parts[1].sum, whole.sum)
    near(parts[0].count + parts[1].count, whole.count)


def test_rewards_are_means_over_the_answers_of_their_kind() -> None:
    metrics = {name: float(t / c) for name, (t, c) in loss_of(*five(), beta=0.5).metrics.items() if c}
    ratios = [sum(row) - sum(ref) for row, ref in zip(ROWS, REF, strict=True)]
    good, bad = (0.5 * (ratios[0] + ratios[2] + ratios[4]) / 3, 0.5 * (ratios[1] + ratios[3]) / 2)
    assert metrics["actor/chosen_reward"] == pytest.approx(good)
    assert metrics["actor/rejected_reward"] == pytest.approx(bad)
    assert metrics["actor/kl_estimate"] == pytest.approx(KL)
    assert KTO(KTOConfig()).derived(metrics) == {"actor/margin": pytest.approx(good - bad)}


def test_a_margin_needs_both_kinds() -> None:
    assert KTO(KTOConfig()).derived({"actor/chosen_reward": 1.0}) == {}
    metrics = loss_of(*judged([[-1.0]], [[-1.0]], [True], kl=0.0)).metrics
    assert float(metrics["actor/rejected_reward"][1]) == 0


def test_an_answer_without_tokens_takes_no_part() -> None:
    log_probs, columns = judged([[-4.0], []], [[-5.0], []], [True, False], kl=0.5)
    loss = loss_of(log_probs, columns)
    assert float(loss.count) == 1
    near(loss.sum, 1 - 1 / (1 + math.exp(-0.05)))
    loss.sum.backward()
    assert log_probs.grad is not None and bool(log_probs.grad.isfinite().all())


@pytest.mark.parametrize("name", ["kl_estimate", "is_chosen", "ref_log_probs", "response_mask"])
def test_a_column_that_is_missing_is_named(name: str) -> None:
    log_probs, columns = five()
    with pytest.raises(MissingField, match=name):
        loss_of(log_probs, {key: column for key, column in columns.items() if key != name})


@pytest.mark.parametrize("wrong", [{"beta": 0}, {"desirable_weight": -1}, {"undesirable_weight": -0.1}])
def test_values_that_make_no_loss_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        KTOConfig.parse(wrong, "algorithm")
