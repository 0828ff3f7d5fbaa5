import pytest
import torch

from tests.algorithms.rows import NAN, columns_of, limited, make_batch, near
from verl.algorithms.dr_grpo import DrGRPO, DrGRPOConfig
from verl.common.errors import ConfigError


def test_advantages_by_hand_on_ragged_rows_with_tool_tokens():
    batch = make_batch([1, 3, 2, 1, 0], [1, 0, 0, 0, 4], groups=[4, 4, 4, 4, 9], masked=[(1, 1), (2, 1)])
    metrics = DrGRPO(DrGRPOConfig()).advantages(batch)
    near(batch["advantages"], [0.75, -0.25, 0, -0.25, -0.25, 0, -0.25])
    assert torch.equal(batch["returns"], batch["advantages"])
    assert metrics["algorithm/groups_single_frac"] == 0.5 and metrics["algorithm/rows_empty"] == 1


@pytest.mark.parametrize("scores", [[1.0] * 4, [0.7] * 8, [0.1] * 3, [0.7], [-2.0]])
def test_groups_that_teach_nothing_are_exactly_zero(scores):
    batch = make_batch([2] * len(scores), scores, groups=[3] * len(scores))
    DrGRPO(DrGRPOConfig()).advantages(batch)
    assert not batch["advantages"].any()


def test_every_token_weighs_the_same_whatever_its_response_is_like():
    """Scores 1 and 0 a short and a long response: sums of tokens over 2 responses of 10."""
    batch = make_batch([1, 3], [1, 0], groups=[0, 0], masked=[(1, 1)])
    algorithm = limited(DrGRPO(DrGRPOConfig()), 10)
    algorithm.advantages(batch)
    columns = columns_of(batch, ["response_mask", "advantages"])
    log_probs = torch.tensor([[-1.0, NAN, NAN], [-1.0, NAN, -2.0]], requires_grad=True)
    loss = algorithm.actor_loss(log_probs, None, columns)
    near(loss.sum.detach(), -0.5 + 2 * 0.5)
    near(loss.count, 2 * 10)
    near(torch.autograd.grad(loss.sum / loss.count, log_probs)[0], [[-0.025, 0, 0], [0.025, 0, 0.025]])


def test_a_row_without_a_token_counts_nowhere():
    batch = make_batch([2, 0], [1, 0], groups=[0, 0])
    algorithm = limited(DrGRPO(DrGRPOConfig()), 4)
    algorithm.advantages(batch)
    loss = algorithm.actor_loss(torch.zeros(2, 2), None, columns_of(batch, ["response_mask", "advantages"]))
    near(torch.stack([loss.sum, loss.count]), [-1, 4])


def test_keys():
    assert DrGRPOConfig(loss_aggregation="token-mean").ineffective_keys() == []
    with pytest.raises(ConfigError, match=r"'loss_norm_tokens': it is rollout\.max_response_tokens"):
        DrGRPOConfig.parse({"loss_norm_tokens": 512})
