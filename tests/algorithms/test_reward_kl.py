import pytest

from tests.algorithms.rows import NAN, make_batch, near
from verl.algorithms.credit import assign_credit
from verl.algorithms.ppo import PPO, PPOConfig
from verl.common.errors import ConfigError, MissingField


def batch_with_kl():
    return make_batch(
        [2, 2, 0], [1, NAN, 5], masked=[(0, 1)],
        old_log_probs=[[-1, NAN], [-1, -1], []], ref_log_probs=[[-1.5, NAN], [NAN, -9], []],
    )  # fmt: skip


def test_rewards_less_the_kl_by_hand():
    policy = PPO(PPOConfig(kl_coef=0.1))
    batch = batch_with_kl()
    rewards, metrics = policy.penalised(assign_credit(batch), batch)
    near(rewards, [[1 - 0.1 * 0.5, 0], [0, 0], [0, 0]])
    assert metrics == {"actor/reward_kl": pytest.approx(0.5), "actor/kl_coef": 0.1}
    squared = PPO(PPOConfig(kl_coef=0.1, kl_estimator="k2"))
    near(squared.penalised(assign_credit(batch), batch)[0][0], [1 - 0.1 * 0.125, 0])


def test_the_coefficient_moves_by_what_was_seen():
    policy = PPO(PPOConfig(kl_coef=0.1, kl_target=0.25, kl_horizon=10))
    batch = batch_with_kl()
    policy.penalised(assign_credit(batch), batch)
    assert policy.state_dict() == {"kl_coef": pytest.approx(0.1 * (1 + 0.2 * 1 / 10))}


def test_without_a_kl_in_the_reward_no_log_probs_are_read():
    batch = make_batch([1], [1])
    credit = assign_credit(batch)
    for policy in (PPO(PPOConfig()), PPO(PPOConfig(kl_coef=0.1, kl_in="loss"))):
        rewards, metrics = policy.penalised(credit, batch)
        assert rewards is credit.token_rewards and metrics == {}
    with pytest.raises(MissingField, match="old_log_probs"):
        PPO(PPOConfig(kl_coef=0.1)).penalised(credit, batch)


def test_steering_a_kl_in_the_loss_is_refused():
    with pytest.raises(ConfigError, match="kl_target"):
        PPOConfig.parse({"kl_coef": 0.1, "kl_in": "loss", "kl_target": 0.1})
