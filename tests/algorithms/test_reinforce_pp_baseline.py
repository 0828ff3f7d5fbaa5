import pytest
import torch

from tests.algorithms.rows import NAN, columns_of, make_batch, near
from verl.algorithms.reinforce_pp_baseline import ReinforcePPBaseline, ReinforcePPBaselineConfig


def run(batch):
    return ReinforcePPBaseline(ReinforcePPBaselineConfig()).advantages(batch)


def test_by_hand_on_ragged_rows_with_tool_tokens():
    """Centred 0.5 on one token, -0.5 on two, 1 on one, -1 on one: mean 0.1, variance 3.75 - 5 * 0.01 over 4."""
    batch = make_batch([1, 3, 1, 1], [1, 0, 2, 0], groups=[0, 0, 1, 1], masked=[(1, 1)])
    metrics = run(batch)
    centred = [0.5, -0.5, 0, -0.5, 1, -1]
    near(batch["returns"], centred)
    mean, deviation = -0.1, ((0.25 * 3 + 2 - 5 * 0.01) / 4) ** 0.5
    near(batch["advantages"], [(x - mean) / deviation if x else 0 for x in centred])
    near(batch["token_rewards"], [1, 0, 0, 0, 2, 0])
    assert metrics["algorithm/groups"] == 2


def test_scores_of_groups_of_any_size_are_on_one_scale():
    """Deviations of single groups play no part: the wider group keeps ten times the advantage."""
    batch = make_batch([1] * 4, [0, 10, 0, 1], groups=[0, 0, 1, 1])
    run(batch)
    near(batch["advantages"][:2] / batch["advantages"][2:], [10, 10])


@pytest.mark.parametrize("scores", [[1.0] * 4, [0.7] * 8, [0.1] * 3, [0.7], [-2.0]])
def test_steps_that_teach_nothing_are_exactly_zero(scores):
    batch = make_batch([2] * len(scores), scores, groups=[3] * len(scores))
    run(batch)
    assert not batch["advantages"].any()


def test_equal_and_single_groups_beside_others_are_shifted_by_the_mean():
    batch = make_batch([1, 3, 1, 1, 1], [1, 0, 0.7, 0.7, 9], groups=[0, 0, 1, 1, 2])
    run(batch)
    near(batch["returns"], [0.5, -0.5, -0.5, -0.5, 0, 0, 0])
    mean, deviation = -1 / 7, ((1 - 7 / 49) / 6) ** 0.5
    near(batch["advantages"][4:], [-mean / deviation] * 3)


def test_failed_and_empty_rows():
    batch = make_batch([2, 1, 0, 1], [1, NAN, 0, 0], groups=[0, 0, 0, 0], rows={"is_scored": [True] * 4})
    metrics = run(batch)
    near(batch["returns"], [2 / 3, 2 / 3, 0, -1 / 3])
    near(batch["advantages"], [3**-0.5, 3**-0.5, 0, -2 * 3**-0.5])
    assert metrics["algorithm/rows_excluded"] == 1 and metrics["algorithm/rows_empty"] == 1
    run(nothing := make_batch([0, 0], [0, 1], groups=[0, 0]))
    assert len(nothing["advantages"]) == 0


def test_the_kl_is_k2_in_the_loss():
    algorithm = ReinforcePPBaseline(ReinforcePPBaselineConfig(kl_coef=0.1))
    assert algorithm.needs == {"reference"} and algorithm.config.ineffective_keys() == []
    batch = make_batch([1, 1], [1, 1], groups=[0, 0], ref_log_probs=[[-1.5], [-1]])
    algorithm.advantages(batch)
    log_probs = torch.tensor([[-1.0], [-1.0]], requires_grad=True)
    loss = algorithm.actor_loss(log_probs, None, columns_of(batch, ["response_mask", "advantages", "ref_log_probs"]))
    near(loss.sum.detach(), 0.1 * 0.125)
    near(torch.autograd.grad(loss.sum, log_probs)[0], [[0.05], [0]])
