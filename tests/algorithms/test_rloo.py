import pytest
import torch

from tests.algorithms.rows import NAN, columns_of, make_batch, near
from verl.algorithms.rloo import RLOO, RLOOConfig
from verl.common.errors import MissingField


def test_by_hand_on_ragged_rows_with_tool_tokens():
    batch = make_batch([1, 3, 2, 1], [1, 0, 0, 0], groups=[4] * 4, masked=[(1, 1), (2, 1)])
    metrics = RLOO(RLOOConfig()).advantages(batch)
    third = 1 / 3
    near(batch["advantages"], [1, -third, 0, -third, -third, 0, -third])
    near(batch["returns"], batch["advantages"])
    near(batch["token_rewards"], [1, 0, 0, 0, 0, 0, 0])
    assert metrics["algorithm/groups"] == 1 and "actor/reward_kl" not in metrics


def test_it_is_the_mean_of_the_others_in_groups_of_any_size():
    batch = make_batch([1] * 5, [3, 1, 8, 2, 2], groups=[0, 1, 0, 1, 1])
    RLOO(RLOOConfig()).advantages(batch)
    near(batch["advantages"], [3 - 8, 1 - 2, 8 - 3, 2 - 1.5, 2 - 1.5])


@pytest.mark.parametrize("scores", [[1.0] * 4, [0.7] * 8, [0.1] * 3, [0.7], [-2.0]])
def test_groups_that_teach_nothing_are_exactly_zero(scores):
    batch = make_batch([2] * len(scores), scores, groups=[3] * len(scores))
    RLOO(RLOOConfig()).advantages(batch)
    assert not batch["advantages"].any()


def test_failed_rows_are_nobodys_baseline():
    batch = make_batch([1] * 4, [1, NAN, 0, 9], groups=[0] * 4, rows={"is_scored": [True, True, True, False]})
    metrics = RLOO(RLOOConfig()).advantages(batch)
    near(batch["advantages"], [1, 0, -1, 0])
    assert metrics["algorithm/rows_excluded"] == 2


def test_the_kl_is_part_of_the_score_that_is_compared():
    """Response 0 loses 0.5 * (0.4 + 0.2), response 1 nothing, the empty one keeps its score."""
    batch = make_batch(
        [3, 1, 0], [1, 0, 0.5], groups=[0, 0, 0], masked=[(0, 1)],
        old_log_probs=[[-1, NAN, -1], [-2], []], ref_log_probs=[[-1.4, NAN, -1.2], [-2], []],
    )  # fmt: skip
    metrics = RLOO(RLOOConfig(kl_coef=0.5)).advantages(batch)
    near(batch["token_rewards"], [-0.2, 0, 0.9, 0])
    near(batch["advantages"], [0.7 - 0.25, 0, 0.7 - 0.25, 0 - 0.6])
    assert metrics["actor/kl_coef"] == 0.5 and metrics["actor/reward_kl"] == pytest.approx(0.15)


def test_what_it_needs():
    assert RLOO(RLOOConfig()).needs == frozenset() and RLOO(RLOOConfig()).trains == ("actor",)
    assert RLOO(RLOOConfig(kl_coef=0.1)).needs == {"reference", "old_log_probs"}
    assert RLOO(RLOOConfig(kl_coef=0.1, kl_in="loss")).needs == {"reference"}
    assert RLOO.min_group_size == 2
    assert RLOO(RLOOConfig(kl_coef=0.1, kl_target=0.2)).state_dict() == {"kl_coef": 0.1}
    with pytest.raises(MissingField, match="old_log_probs"):
        RLOO(RLOOConfig(kl_coef=0.1)).advantages(make_batch([1], [1]))


def test_the_gradient_is_that_of_reinforce():
    batch = make_batch([1, 2], [1, 0], groups=[0, 0])
    algorithm = RLOO(RLOOConfig())
    algorithm.advantages(batch)
    log_probs = torch.tensor([[-1.0, NAN], [-1.0, -2.0]], requires_grad=True)
    loss = algorithm.actor_loss(log_probs, None, columns_of(batch, ["response_mask", "advantages"]))
    near(torch.autograd.grad(loss.sum / loss.count, log_probs)[0], [[-1 / 3, 0], [1 / 3, 1 / 3]])
