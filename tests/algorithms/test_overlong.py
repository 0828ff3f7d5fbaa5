import pytest
import torch

from tests.algorithms.rows import NAN, limited, make_batch, near
from verl.algorithms.grpo import GRPO, GRPOConfig
from verl.algorithms.overlong import OverlongConfig, Ramp, overlong_loss
from verl.algorithms.ppo import PPO, PPOConfig
from verl.common.errors import ConfigError


def test_the_ramp_by_hand():
    lengths = torch.tensor([0, 16, 17, 18, 20, 25])
    near(overlong_loss(lengths, Ramp(20, 4, 1)), [0, 0, -0.25, -0.5, -1, -1])
    near(overlong_loss(lengths, Ramp(20, 4, 3)), [0, 0, -0.75, -1.5, -3, -3])
    near(overlong_loss(lengths, Ramp(20, 20, 1)), [0, -0.8, -0.85, -0.9, -1, -1])


def test_a_ramp_ends_at_the_longest_response():
    assert OverlongConfig(buffer_tokens=4, penalty=3).ramp(20) == Ramp(max_tokens=20, buffer_tokens=4, penalty=3)
    assert OverlongConfig().ramp(20) is None and OverlongConfig().ramp(None) is None


def test_scores_lose_it_before_they_are_compared():
    batch = make_batch([1, 2, 3, 4], [1, 1, 1, NAN], groups=[0] * 4)
    config = GRPOConfig(normalise_by_std=False, overlong={"buffer_tokens": 2})
    metrics = limited(GRPO(config), 3).advantages(batch)
    near(batch["token_rewards"], [1, 0, 0.5, 0, 0, 0] + [0] * 4)
    near(batch["advantages"], [0.5, 0, 0, -0.5, -0.5, -0.5] + [0] * 4)
    assert metrics["algorithm/rows_excluded"] == 1 and metrics["algorithm/groups_equal_frac"] == 0


def test_tool_output_costs_nothing():
    batch = make_batch([4, 1], [1, 1], groups=[0, 0], masked=[(0, 1), (0, 2), (0, 3)])
    metrics = limited(GRPO(GRPOConfig(overlong={"buffer_tokens": 2})), 3).advantages(batch)
    assert metrics["algorithm/groups_equal_frac"] == 1 and batch["token_rewards"].tolist() == [1, 0, 0, 0, 1]


def test_with_a_critic():
    batch = make_batch([1, 2], [1, 1], values=[[0], [0, 0]])
    config = PPOConfig(whiten_advantages=False, overlong={"buffer_tokens": 1, "penalty": 0.5})
    limited(PPO(config), 2).advantages(batch)
    near(batch["returns"], [1, 0.5, 0.5])


def test_a_limit_of_its_own_is_refused():
    with pytest.raises(ConfigError, match=r"overlong: unknown key 'max_tokens': it is rollout\.max_response_tokens"):
        GRPOConfig.parse({"overlong": {"max_tokens": 8}})


def test_keys_without_effect():
    assert GRPOConfig(overlong={"penalty": 2}).ineffective_keys() == [
        "overlong.penalty (overlong.buffer_tokens is null)"
    ]
    assert GRPOConfig(overlong={"buffer_tokens": 8, "penalty": 2}).ineffective_keys() == []
