import pytest
import torch

from tests.algorithms.rows import NAN, columns_of, make_batch, near
from verl.algorithms.reinforce_pp import ReinforcePP, ReinforcePPConfig
from verl.common.errors import MissingField


def whitened(values):
    x = torch.tensor(values, dtype=torch.float64)
    return (x - x.mean()) / x.std()


def test_by_hand_on_ragged_rows_with_tool_tokens():
    """Discount 0.5; the tool tokens of row 0 are stepped over, and the one at its end doesn't hold the score."""
    batch = make_batch([5, 1, 0], [4, -2, 7], masked=[(0, 1), (0, 4)])
    metrics = ReinforcePP(ReinforcePPConfig(gamma=0.5)).advantages(batch)
    near(batch["token_rewards"], [0, 0, 0, 4, 0, -2])
    near(batch["returns"], [1, 0, 2, 4, 0, -2])
    scaled = whitened([1, 2, 4, -2])
    near(batch["advantages"], [scaled[0], 0, scaled[1], scaled[2], 0, scaled[3]])
    assert metrics["algorithm/rows_empty"] == 1


def test_the_kl_is_a_cost_of_tokens():
    batch = make_batch(
        [3, 1], [1, 0], masked=[(0, 1)],
        old_log_probs=[[-1, NAN, -1], [-2]], ref_log_probs=[[-1.4, NAN, -1.2], [-2]],
    )  # fmt: skip
    metrics = ReinforcePP(ReinforcePPConfig(kl_coef=0.5)).advantages(batch)
    near(batch["token_rewards"], [-0.2, 0, 0.9, 0])
    near(batch["returns"], [0.7, 0, 0.9, 0])
    scaled = whitened([0.7, 0.9, 0])
    near(batch["advantages"], [scaled[0], 0, scaled[1], scaled[2]])
    assert metrics["actor/reward_kl"] == pytest.approx(0.15)


@pytest.mark.parametrize("scores", [[1.0] * 4, [0.7] * 8, [0.1] * 3])
def test_equal_scores_are_exactly_zero(scores):
    batch = make_batch([2] * len(scores), scores)
    ReinforcePP(ReinforcePPConfig()).advantages(batch)
    assert not batch["advantages"].any()


@pytest.mark.parametrize("lengths", [[0], [1], [0, 1]])
def test_nothing_to_compare(lengths):
    batch = make_batch(lengths, [3] * len(lengths))
    ReinforcePP(ReinforcePPConfig()).advantages(batch)
    assert batch["advantages"].tolist() == [0] * sum(lengths)


def test_failed_rows_are_not_in_the_statistics():
    batch = make_batch([1, 2, 1], [1, NAN, 0])
    metrics = ReinforcePP(ReinforcePPConfig()).advantages(batch)
    near(batch["advantages"], [0.5**0.5, 0, 0, -(0.5**0.5)])
    assert batch["response_mask"].tolist() == [True, False, False, True] and metrics["algorithm/rows_excluded"] == 1


def test_what_it_needs():
    assert ReinforcePP(ReinforcePPConfig()).needs == frozenset() and ReinforcePP.min_group_size == 1
    assert ReinforcePP(ReinforcePPConfig(kl_coef=0.1)).needs == {"reference", "old_log_probs"}
    assert ReinforcePP(ReinforcePPConfig()).trains == ("actor",)
    with pytest.raises(MissingField, match="old_log_probs"):
        ReinforcePP(ReinforcePPConfig(kl_coef=0.1)).advantages(make_batch([1], [1]))


def test_the_gradient():
    batch = make_batch([1, 2], [1, 0])
    algorithm = ReinforcePP(ReinforcePPConfig())
    algorithm.advantages(batch)
    scaled = whitened([1, 0, 0])
    log_probs = torch.tensor([[-1.0, NAN], [-1.0, -2.0]], requires_grad=True)
    loss = algorithm.actor_loss(log_probs, None, columns_of(batch, ["response_mask", "advantages"]))
    near(torch.autograd.grad(loss.sum, log_probs)[0], [[-scaled[0], 0], [-scaled[1], -scaled[2]]])
