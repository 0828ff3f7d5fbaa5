import math

import pytest
import torch
from pydantic import ValidationError

from tests.algorithms.rows import NAN, near
from verl.algorithms.correction import CorrectionConfig, correction_weights, rollout_diff

LN2 = math.log(2)
OLD = torch.tensor([[0.0, 0.0, 0.0, NAN], [0.0, NAN, 0.0, 0.0]])
ROLLOUT = torch.tensor([[-LN2 / 2, -2 * LN2, 2 * LN2, NAN], [-LN2, NAN, LN2 / 2, NAN]])
MASK = torch.tensor([[True, True, True, False], [True, False, True, False]])
# ratios by token: sqrt 2, 4, 1/4 | 2, 1/sqrt 2; by row: sqrt 2 | sqrt 2
R = math.sqrt(2)


@pytest.mark.parametrize(
    ("mode", "kind", "expected", "touched"),
    [
        ("token", "truncate", [[R, 2, 0.25, 0], [2, 0, 1 / R, 0]], 1),
        ("token", "mask", [[R, 0, 0, 0], [2, 0, 1 / R, 0]], 2),
        ("sequence", "truncate", [[R, R, R, 0], [R, 0, R, 0]], 0),
        ("sequence", "mask", [[R, R, R, 0], [R, 0, R, 0]], 0),
    ],
)
def test_by_hand(mode, kind, expected, touched):
    # 2 lies on the cap: hold it a hair below so that float rounding doesn't decide
    config = CorrectionConfig(mode=mode, kind=kind, cap=2.00001)
    weights, metrics = correction_weights(OLD, ROLLOUT, MASK, config)
    near(weights, expected, 1e-4)
    near(metrics["actor/correction_touched_frac"][0], touched)
    near(metrics["actor/correction_weight/mean"][0], weights.sum())
    near(metrics["actor/correction_weight/mean"][1], 5)
    near(metrics["actor/correction_weight/max"][0], weights.max())


def test_a_whole_response_is_dropped_by_its_product():
    old, rollout = torch.full((1, 3), LN2 / 2), torch.zeros(1, 3)  # 2^1.5 = 2.83; each token is within the cap
    mask = torch.ones(1, 3).bool()
    near(correction_weights(old, rollout, mask, CorrectionConfig(mode="sequence", kind="mask"))[0], [[0.0] * 3])
    near(correction_weights(old, rollout, mask, CorrectionConfig(mode="sequence"))[0], [[2.0] * 3])
    near(correction_weights(rollout, old, mask, CorrectionConfig(mode="sequence", kind="mask"))[0], [[0.0] * 3])


def test_weights_carry_no_gradient_and_stay_finite():
    old = torch.tensor([[-400.0, 400.0]], requires_grad=True)
    for mode in ("token", "sequence"):
        weights, _ = correction_weights(old, torch.zeros(1, 2), torch.ones(1, 2).bool(), CorrectionConfig(mode=mode))
        assert torch.isfinite(weights).all() and not weights.requires_grad


def test_difference_of_log_probs():
    metrics = rollout_diff(OLD, ROLLOUT, MASK)
    near(metrics["actor/rollout_log_prob_diff/mean"][0], (0.5 + 2 + 2 + 1 + 0.5) * LN2)
    near(metrics["actor/rollout_log_prob_diff/mean"][1], 5)
    near(metrics["actor/rollout_log_prob_diff/max"][0], 2 * LN2)
    near(metrics["actor/rollout_kl"][0], (-0.5 - 2 + 2 - 1 + 0.5) * LN2)


def test_empty_rows():
    weights, metrics = correction_weights(
        torch.full((2, 2), NAN), torch.full((2, 2), NAN), torch.zeros(2, 2).bool(), CorrectionConfig(mode="sequence")
    )
    assert torch.equal(weights, torch.zeros(2, 2)) and metrics["actor/correction_weight/mean"][1] == 0


def test_config():
    with pytest.raises(ValidationError, match="cap"):
        CorrectionConfig(mode="token", cap=1.0)
    assert CorrectionConfig(mode="none", cap=3.0).ineffective_keys() == ["correction.cap (correction.mode is none)"]
    assert CorrectionConfig(cap=2.0, kind="truncate").ineffective_keys() == []
    assert CorrectionConfig(mode="token", cap=3.0).ineffective_keys() == []
