import math

import pytest
import torch
from pydantic import ValidationError

from tests.algorithms.rows import NAN, columns_of, make_batch, near
from verl.algorithms.ppo import PPO, PPOConfig
from verl.common.errors import MissingField


def ppo(**keys) -> PPO:
    return PPO(PPOConfig(**keys))


def test_by_hand_with_a_tool_token_inside():
    batch = make_batch([3, 4], [1, 2], masked=[(1, 2)], values=[[0.1, 0.2, 0.3], [1, 1, NAN, 1]])
    metrics = ppo(gamma=0.5, gae_lambda=0.5, whiten_advantages=False).advantages(batch)
    # row 1: last 2 - 1 = 1; second .5*1 - 1 + .25*1 = -.25; first .5*1 - 1 + .25*-.25 = -.5625
    near(batch["advantages"], [0.03125, 0.125, 0.7, -0.5625, -0.25, 0, 1])
    near(batch["returns"], [0.13125, 0.325, 1.0, 0.4375, 0.75, 0, 2])
    near(batch["token_rewards"], [0, 0, 1, 0, 0, 0, 2])
    assert metrics["critic/returns/mean"] == pytest.approx((0.13125 + 0.325 + 1 + 0.4375 + 0.75 + 2) / 6)


def test_a_score_behind_a_final_tool_token_is_not_lost():
    batch = make_batch([3], [2], masked=[(0, 2)], values=[[0.5, 0.5, NAN]])
    ppo(whiten_advantages=False).advantages(batch)
    near(batch["token_rewards"], [0, 2, 0])
    near(batch["advantages"], [1.5, 1.5, 0])


def test_whitened_over_the_step_and_zero_outside():
    batch = make_batch([1, 2, 1], [2, 4, 6], masked=[(1, 0)], values=[[0], [NAN, 0], [0]])
    ppo().advantages(batch)
    near(batch["advantages"], [-1, 0, 0, 1])
    near(batch["returns"], [2, 0, 4, 6])


def test_equal_advantages_whiten_to_zero():
    batch = make_batch([2, 1, 3], [0.7] * 3, values=[[0, 0], [0], [0] * 3])
    metrics = ppo().advantages(batch)
    assert torch.equal(batch["advantages"], torch.zeros(6))
    assert "critic/explained_variance" not in metrics


def test_explained_variance():
    batch = make_batch([1, 1, 1], [0, 1, 2], values=[[0], [0.5], [1]])
    assert ppo().advantages(batch)["critic/explained_variance"] == pytest.approx(0.75)


def test_failed_and_empty_rows_take_no_part():
    values = [[0.5], [NAN, NAN], [], [0.5]]
    scored = {"is_scored": [True, False, True, True]}
    batch = make_batch([1, 2, 0, 1], [1, NAN, 1, 0], rows=scored, values=values)
    algorithm = ppo()
    metrics = algorithm.advantages(batch)
    half = 0.5**0.5
    near(batch["advantages"], [half, 0, 0, -half])
    assert (metrics["algorithm/rows_excluded"], metrics["algorithm/rows_empty"]) == (1, 1)
    columns = columns_of(batch, ["response_mask", "advantages", "returns", "values"])
    loss = algorithm.actor_loss(torch.full((4, 2), -1.0, requires_grad=True), None, columns)
    assert loss.count == 2 and torch.isfinite(loss.sum)
    near(algorithm.critic_loss(torch.zeros(4, 2), columns).count, 2)


def test_nothing_to_train_on():
    batch = make_batch([0, 0], [1, 0], values=[[], []])
    ppo().advantages(batch)
    assert len(batch["advantages"]) == 0
    batch = make_batch([1, 1], [NAN, NAN], values=[[1], [2]])
    ppo().advantages(batch)
    near(batch["advantages"], [0, 0])


def test_kl_in_the_reward_by_hand():
    batch = make_batch(
        [3, 1, 0],
        [1, 2, 5],
        masked=[(0, 1)],
        values=[[0, NAN, 0], [0], []],
        old_log_probs=[[-1, NAN, -2], [-1], []],
        ref_log_probs=[[-1.5, NAN, -1], [-3], []],
    )
    algorithm = ppo(kl_coef=0.1, whiten_advantages=False)
    metrics = algorithm.advantages(batch)
    near(batch["token_rewards"], [-0.05, 0, 1.1, 1.8])
    near(batch["advantages"], [1.05, 0, 1.1, 1.8])
    assert metrics["actor/reward_kl"] == pytest.approx((-0.25 + 2) / 2)  # over rows that have tokens
    assert metrics["actor/kl_coef"] == pytest.approx(0.1)
    with_k2 = make_batch([1], [1], values=[[0]], old_log_probs=[[-1]], ref_log_probs=[[-1.5]])
    ppo(kl_coef=0.1, kl_estimator="k2").advantages(with_k2)
    near(with_k2["token_rewards"], [1 - 0.0125])


def test_kl_of_failed_rows_steers_nothing():
    def step(algorithm, kl, scored=True):
        batch = make_batch(
            [1, 1], [1, 0], values=[[0], [0]], rows={"is_scored": [scored, False]},
            old_log_probs=[[kl], [50]], ref_log_probs=[[0], [0]],
        )  # fmt: skip
        return algorithm.advantages(batch)

    algorithm = ppo(kl_coef=0.1, kl_target=0.05, kl_horizon=10)
    assert step(algorithm, 0.06)["actor/kl_coef"] == pytest.approx(0.1)
    assert step(algorithm, 0.05)["actor/kl_coef"] == pytest.approx(0.1 * 1.02)  # one row of a horizon of ten
    assert algorithm.state_dict()["kl_coef"] == pytest.approx(0.102)
    step(algorithm, 9.0, scored=False)
    assert algorithm.state_dict()["kl_coef"] == pytest.approx(0.102)
    resumed = ppo(kl_coef=0.1, kl_target=0.05, kl_horizon=10)
    resumed.load_state_dict(algorithm.state_dict())
    assert step(resumed, 0.05)["actor/kl_coef"] == pytest.approx(0.102)


def test_passes_that_were_not_made_are_named():
    batch = make_batch([1], [1], values=[[0]])
    with pytest.raises(MissingField, match="old_log_probs"):
        ppo(kl_coef=0.1).advantages(batch)
    with pytest.raises(MissingField, match="critic"):
        ppo().advantages(make_batch([1], [1]))


def test_critic_loss_by_hand():
    columns = {
        "response_mask": torch.tensor([[True, True], [True, False]]),
        "values": torch.tensor([[1.0, 1.0], [0.0, NAN]]),
        "returns": torch.tensor([[3.0, 3.0], [1.0, NAN]]),
    }
    values = torch.tensor([[2.0, 1.0], [0.25, NAN]], requires_grad=True)
    loss = ppo().critic_loss(values, columns)
    near(loss.sum.detach(), 1.125 + 2 + 0.28125)
    near(loss.count, 3)
    near(torch.autograd.grad(loss.sum, values)[0], [[0, -2], [-0.75, 0]])
    near(torch.stack(loss.metrics["critic/values/mean"]), [3.25, 3])
    near(torch.stack(loss.metrics["critic/clip_frac"]), [1, 3])
    near(torch.stack(loss.metrics["critic/value_loss"]), [1.125 + 2 + 0.28125, 3])


@pytest.mark.parametrize(
    "keys",
    [
        {"dual_clip": 1.0},
        {"clip_low": 1.5},
        {"clip_low": 0.0},
        {"clip_high": -0.1},
        {"gamma": 1.1},
        {"gae_lambda": -0.1},
        {"value_clip": 0.0},
        {"kl_coef": -1.0},
        {"kl_estimator": "k4"},
        {"loss_aggregation": "mean"},
        {"clip_ratio": 0.2},
        {"kl_target": 0.1, "kl_in": "loss", "kl_coef": 0.1},
    ],
)
def test_wrong_keys_are_named(keys):
    with pytest.raises(ValidationError, match=next(iter(keys))):
        PPOConfig(**keys)


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"kl_estimator": "k3"}, ["kl_estimator"]),
        ({"kl_in": "loss"}, ["kl_in"]),
        ({"kl_target": 0.1}, ["kl_target"]),
        ({"kl_horizon": 5.0, "kl_coef": 0.1}, ["kl_horizon"]),
        ({"kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k1"}, ["kl_estimator"]),
        ({"kl_coef": 0.1, "kl_estimator": "k3+"}, ["the + of kl_estimator"]),
        ({"correction": {"mode": "none", "cap": 3.0}}, ["correction.cap"]),
        ({"kl_coef": 0.1, "kl_target": 0.1, "kl_horizon": 5.0, "kl_estimator": "k2"}, []),
        ({"kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k1+"}, []),
        (PPOConfig().model_dump(), []),
    ],
)
def test_keys_without_effect_are_found(keys, found):
    got = PPOConfig(**keys).ineffective_keys()
    assert len(got) == len(found) and all(g.startswith(f) for g, f in zip(got, found, strict=True))


def test_default_estimators():
    assert PPOConfig(kl_coef=0.1).estimator == "k1" and PPOConfig(kl_coef=0.1, kl_in="loss").estimator == "k3"
    assert math.isclose(PPOConfig(kl_coef=0.1, kl_in="loss").loss_kl_coef, 0.1)


def test_the_critic_warms_up_alone():
    algorithm = ppo(critic_warmup_steps=2)
    assert [algorithm.trains_in(step) for step in (1, 2, 3)] == [("critic",), ("critic",), ("critic", "actor")]
    assert ppo().trains_in(1) == ("critic", "actor")
