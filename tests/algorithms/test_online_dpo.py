from __future__ import annotations

import math

import pytest
import torch

from tests.algorithms.rows import NAN, make_batch, near
from verl.algorithms.online_dpo import OnlineDPO, OnlineDPOConfig, best_and_worst
from verl.batch import FinishReason
from verl.common.errors import MissingField, ShapeError


def online(**keys: object) -> OnlineDPO:
    return OnlineDPO(OnlineDPOConfig(**keys))  # type: ignore[arg-type]


def test_the_best_and_the_worst_of_each_group_make_its_pair() -> None:
    """Groups 7 (rows 0 2 4 5), 3 (rows 1 3 6; row 6 is equal to row 1, which came first), 9 (row 7, alone)."""
    batch = make_batch([1] * 8, [0.1, 0.7, 0.9, 0.2, 0.35, -1, 0.7, 5], groups=[7, 3, 7, 3, 7, 7, 3, 9])
    chosen, rejected = best_and_worst(batch)
    assert (chosen.tolist(), rejected.tolist()) == ([1, 2], [3, 5])
    assert online().keeps(batch).nonzero()[:, 0].tolist() == [1, 2, 3, 5]


@pytest.mark.parametrize("scores", [[1.0] * 4, [0.7] * 8, [0.7], [0.1 + 0.2, 0.3]])
def test_a_group_without_difference_makes_no_pair(scores: list[float]) -> None:
    batch = make_batch([2] * len(scores), scores, groups=[3] * len(scores))
    assert not online().keeps(batch).any()
    kept = batch.select(online().keeps(batch))
    assert online().advantages(kept) == {"algorithm/pairs": 0.0} and len(kept) == 0


def test_failed_given_up_and_empty_responses_are_in_no_pair() -> None:
    batch = make_batch(
        [1, 1, 1, 0, 1, 2], [9, NAN, 8, 7, 1, 0], groups=[0] * 6, masked=[(5, 0), (5, 1)],
        rows={
            "is_scored": [True, True, False, True, True, True],
            "finish_reason": [FinishReason.ABORT, *[FinishReason.STOP] * 5],
        },
    )  # fmt: skip
    assert not online().keeps(batch).any()
    batch.put("finish_reason", torch.zeros(6, dtype=torch.int64))
    assert online().keeps(batch).tolist() == [True, False, False, False, True, False]


def test_by_hand() -> None:
    """Ratios of row 0: (-1 + 2) + (-2 + 2) = 1, of row 1: -3 + 1 = -2; beta 0.1: margin 0.3, loss ln(1 + e^-0.3)."""
    batch = make_batch([2, 1, 1], [1, 0.5, 0], groups=[4] * 3, ref_log_probs=[[-2, -2], [-9], [-1]])
    kept = batch.select(online().keeps(batch))
    metrics = online().advantages(kept)
    assert metrics == {"algorithm/pairs": 1.0, "algorithm/score_gap/mean": 1.0}
    assert kept["is_chosen"].tolist() == [True, False] and kept["pair_id"].tolist() == [4, 4]
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, NAN]], requires_grad=True)
    columns = {name: kept.padded(name, NAN) for name in ("ref_log_probs",)}
    columns |= {
        "response_mask": kept.padded("response_mask"),
        "pair_id": kept["pair_id"],
        "is_chosen": kept["is_chosen"],
    }
    loss = online().actor_loss(log_probs, None, columns)
    assert (loss.sum / loss.count).item() == pytest.approx(math.log1p(math.exp(-0.3)), abs=1e-6)
    pull = 0.1 / (1 + math.exp(0.3))
    near(torch.autograd.grad(loss.sum, log_probs)[0], [[-pull, -pull], [pull, 0]])


def test_rows_that_are_no_pairs_are_refused() -> None:
    with pytest.raises(ShapeError, match="3 rows make 1 pairs"):
        online().advantages(make_batch([1, 1, 1], [1, 2, 3], groups=[0, 0, 0]))


def test_its_keys_are_those_of_dpo() -> None:
    algorithm = online(beta=0.3, loss="ipo", max_generations=4)
    assert algorithm.max_generations == 4 and algorithm.needs == {"reference"} and algorithm.trains == ("actor",)
    assert algorithm.config.ineffective_keys() == []
    assert online(loss="ipo", label_smoothing=0.1).config.ineffective_keys() == [
        "label_smoothing (algorithm.loss is 'ipo', which has none)"
    ]
    columns = {"response_mask": torch.ones(2, 1).bool(), "pair_id": torch.zeros(2), "is_chosen": torch.tensor([1, 0])}
    log_probs, zeros = torch.tensor([[-1.0], [-3.0]]), torch.zeros(2, 1)
    loss = algorithm.actor_loss(log_probs, None, {**columns, "ref_log_probs": zeros})
    assert loss.sum.item() == pytest.approx((2 - 1 / 0.6) ** 2)
    with pytest.raises(MissingField, match="ref_log_probs"):
        algorithm.actor_loss(log_probs, None, columns)
