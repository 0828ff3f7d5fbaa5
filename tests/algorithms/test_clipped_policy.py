import math

import pytest
import torch

from tests.algorithms.rows import NAN, limited, near
from verl.algorithms.base import Loss
from verl.algorithms.cispo import CISPO, CISPOConfig
from verl.algorithms.grpo import GRPO, GRPOConfig
from verl.algorithms.gspo import GSPO, GSPOConfig
from verl.algorithms.ppo import PPO, PPOConfig
from verl.common.errors import MissingField, ShapeError

NAMES = ["log_probs", "entropy", "advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs"]


def rows(lengths=(4, 1, 0, 7, 2), seed=0):
    """Random columns of ragged rows, NaN right of each row's end and under one tool token."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    mask[3, 2] = False
    data = {name: torch.where(mask, torch.randn(mask.shape, generator=generator) * 0.4 - 1, NAN) for name in NAMES}
    data["advantages"] = data["advantages"] + 1
    return data | {"response_mask": mask}


def loss_of(algorithm, data, index, width, theta):
    part = {name: column[index][:, :width] for name, column in data.items()}
    log_probs, entropy = (part.pop(name).nan_to_num(-7.0) * theta for name in ("log_probs", "entropy"))
    return algorithm.actor_loss(log_probs, entropy, part)


def run(algorithm, data, cut):
    """Loss, gradient and metrics of one update whose rows are cut into micro-batches, each as wide as it must be."""
    theta = torch.tensor(1.0, requires_grad=True)
    total = count = gradient = torch.tensor(0.0)
    sums: dict[str, list[torch.Tensor]] = {}
    for index in cut:
        width = max(
            (int(data["response_mask"][i].nonzero().max()) + 1 for i in index if data["response_mask"][i].any()),
            default=0,
        )
        loss = loss_of(algorithm, data, torch.tensor(index, dtype=torch.int64), width, theta)
        total, count = total + loss.sum.detach(), count + loss.count
        gradient = gradient + torch.autograd.grad(loss.sum, theta)[0]
        for name, (value, n) in loss.metrics.items():
            assert not value.requires_grad and not n.requires_grad
            old = sums.setdefault(name, [value, n])
            if old[0] is not value:
                reduce = {"max": torch.maximum, "min": torch.minimum}.get(name.rsplit("/")[-1], torch.add)
                sums[name] = [reduce(old[0], value), old[1] + n]
    metrics = {k: v if k.endswith(("/max", "/min")) else v / n for k, (v, n) in sums.items()}
    return total / Loss.divisor(count), gradient / Loss.divisor(count), metrics


ALGORITHMS = {
    "grpo": GRPO(GRPOConfig(kl_coef=0.3, entropy_coef=0.2)),
    "grpo, sequences": GRPO(GRPOConfig(kl_coef=0.3, entropy_coef=0.2, loss_aggregation="seq-mean-token-mean")),
    "ppo, sums": PPO(PPOConfig(kl_coef=0.3, kl_in="loss", loss_aggregation="seq-mean-token-sum")),
    "norm": limited(GRPO(GRPOConfig(kl_coef=0.1, loss_aggregation="seq-mean-token-sum-norm")), 16),
    "plain sum": GRPO(GRPOConfig(entropy_coef=0.1, loss_aggregation="token-sum")),
    "corrected": GRPO(GRPOConfig(correction={"mode": "sequence", "kind": "truncate"})),
    "gspo": GSPO(GSPOConfig(clip_low=0.3, clip_high=0.3, kl_coef=0.1, entropy_coef=0.1)),
    "cispo": CISPO(CISPOConfig(clip_low=0.2, clip_high=0.2, kl_coef=0.1)),
    "dropped": GRPO(GRPOConfig(correction={"mode": "token", "kind": "mask", "cap": 1.3})),
}  # fmt: skip


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    "cut", [[[0, 1], [2, 3], [4]], [[0], [1], [2], [3], [4]], [[4, 2], [3, 1, 0]], [[0, 1, 2, 3, 4], []]]
)
def test_loss_gradient_and_metrics_do_not_depend_on_the_cut(name, cut):
    whole = run(ALGORITHMS[name], rows(), [[0, 1, 2, 3, 4]])
    pieces = run(ALGORITHMS[name], rows(), cut)
    near(pieces[0], whole[0])
    near(pieces[1], whole[1])
    assert whole[1].abs() > 1e-3
    assert pieces[2].keys() == whole[2].keys()
    for key, value in whole[2].items():
        near(pieces[2][key], value)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_stands_outside_the_mask_reaches_nothing(name):
    data = rows()
    mask = data["response_mask"]
    log_probs = data.pop("log_probs").requires_grad_()
    entropy = data.pop("entropy").requires_grad_()
    loss = ALGORITHMS[name].actor_loss(log_probs, entropy, data)
    gradients = torch.autograd.grad(loss.sum, [log_probs, entropy], allow_unused=True, materialize_grads=True)
    for gradient in gradients:
        assert torch.isfinite(gradient).all() and torch.equal(gradient[~mask], torch.zeros(int((~mask).sum())))
    filled = {k: torch.where(mask, v, -3.0) if v.is_floating_point() else v for k, v in data.items()}
    other = ALGORITHMS[name].actor_loss(torch.where(mask, log_probs, 5.0), torch.where(mask, entropy, 5.0), filled)
    assert torch.equal(loss.sum, other.sum)
    assert all(torch.isfinite(v).all() for pair in loss.metrics.values() for v in pair)


def columns(advantages, mask=None, **more):
    advantages = torch.tensor(advantages)
    mask = torch.ones_like(advantages, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return {"advantages": advantages, "response_mask": mask} | {k: torch.tensor(v) for k, v in more.items()}


def test_all_terms_by_hand():
    lp = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    entropy = torch.tensor([[2.0, 4.0]], requires_grad=True)
    data = columns([[1.0, -1.0]], old_log_probs=[[-1.0, -1.0]], ref_log_probs=[[-1.5, -1.0]])
    loss = GRPO(GRPOConfig(kl_coef=0.1, entropy_coef=0.01, kl_estimator="k2")).actor_loss(lp, entropy, data)
    near(loss.sum.detach(), 0.0 + 0.1 * 0.125 - 0.01 * 6)
    near(loss.count, 2)
    by_lp, by_entropy = torch.autograd.grad(loss.sum, [lp, entropy])
    near(by_lp, [[-1 + 0.1 * 0.5, 1.0]])
    near(by_entropy, [[-0.01, -0.01]])
    for key, expected in {
        "actor/policy_loss": 0.0,
        "actor/kl": 0.125,
        "actor/entropy": 6.0,
        "actor/approx_kl": 0.0,
    }.items():
        near(torch.stack(loss.metrics[key]), [expected, 2])


@pytest.mark.parametrize("how", ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_kl_and_entropy_are_logged_a_token_however_the_loss_is_aggregated(how):
    """Or a sum over a long response would look like a policy that has run away (docs/health.md)."""
    algorithm = GRPO(GRPOConfig(kl_coef=0.1, kl_estimator="k1", loss_aggregation=how))
    data = columns([[1.0] * 4] * 2, mask=[[True] * 4, [True, False, False, False]], ref_log_probs=[[-1.5] * 4] * 2)
    loss = algorithm.actor_loss(torch.full((2, 4), -1.0, requires_grad=True), torch.full((2, 4), 0.7), data)
    for key, expected in {"actor/kl": 0.5, "actor/entropy": 0.7}.items():
        total, count = loss.metrics[key]
        near(total / count, expected)


def test_entropy_without_a_coefficient_is_a_metric_only():
    lp = torch.zeros(1, 2, requires_grad=True)
    loss = GRPO(GRPOConfig()).actor_loss(lp, torch.tensor([[1.0, 3.0]]), columns([[1.0, 1.0]]))
    near(torch.stack(loss.metrics["actor/entropy"]), [4, 2])
    near(loss.sum.detach(), -2.0)


def test_an_entropy_bonus_without_a_gradient_is_refused():
    algorithm = GRPO(GRPOConfig(entropy_coef=0.1))
    assert algorithm.needs_entropy_gradient and not GRPO(GRPOConfig()).needs_entropy_gradient
    with pytest.raises(AssertionError, match="gradient"):
        algorithm.actor_loss(torch.zeros(1, 1, requires_grad=True), torch.ones(1, 1), columns([[1.0]]))


def test_kl_in_the_reward_stays_out_of_the_loss():
    data = columns([[1.0]], ref_log_probs=[[-3.0]])
    lp = torch.tensor([[-1.0]], requires_grad=True)
    loss = PPO(PPOConfig(kl_coef=0.5)).actor_loss(lp, None, data)
    near(loss.sum.detach(), -1.0)
    near(loss.metrics["actor/kl"][0], 2.0)


def test_without_old_log_probs_the_ratio_is_one_and_the_gradient_is_the_policy_gradient():
    lp = torch.tensor([[-0.5, -2.0]], requires_grad=True)
    loss = GRPO(GRPOConfig()).actor_loss(lp, None, columns([[0.5, -2.0]]))
    near(torch.autograd.grad(loss.sum, lp)[0], [[-0.5, 2.0]])
    for stat in ("max", "min"):
        near(loss.metrics[f"actor/ratio/{stat}"][0], 1.0)
    near(torch.stack(loss.metrics["actor/ratio/mean"]), [2, 2])


def test_a_sampler_at_another_temperature_shows():
    """Logits 2 1 0, id 0, T = 0.5: tempered on both sides the ratio is 1, on one side it is off and says so."""
    logits = torch.tensor([2.0, 1.0, 0.0])
    tempered, untempered = (x.log_softmax(0)[0].reshape(1, 1) for x in (logits / 0.5, logits))
    near(tempered, [[-0.142932]])
    same = GRPO(GRPOConfig()).actor_loss(
        tempered,
        None,
        columns([[1.0]]) | {"old_log_probs": tempered, "rollout_log_probs": tempered, "ref_log_probs": tempered},
    )
    near(same.metrics["actor/ratio/max"][0], 1.0, 1e-7)
    for key in ("actor/kl", "actor/approx_kl", "actor/rollout_log_prob_diff/max", "actor/rollout_kl"):
        near(same.metrics[key][0], 0.0, 1e-7)
    off = GRPO(GRPOConfig()).actor_loss(
        tempered, None, columns([[1.0]]) | {"old_log_probs": untempered, "rollout_log_probs": untempered}
    )
    near(off.metrics["actor/ratio/mean"][0], 1.3030, 1e-4)
    near(
        GRPO(GRPOConfig())
        .actor_loss(untempered, None, columns([[1.0]]) | {"rollout_log_probs": tempered})
        .metrics["actor/rollout_log_prob_diff/max"][0],
        0.407606 - 0.142932,
    )


def test_correction_weights_the_policy_loss_alone():
    lp = torch.tensor([[math.log(0.5)] * 2], requires_grad=True)
    data = columns([[1.0, 1.0]], rollout_log_probs=[[math.log(0.1), math.log(0.5)]], ref_log_probs=[[-1.0, -1.0]])
    loss = GRPO(GRPOConfig(kl_coef=1.0, correction={"mode": "token"})).actor_loss(lp, None, data)
    kl = GRPO(GRPOConfig(kl_coef=1.0)).actor_loss(lp, None, data | {"advantages": torch.zeros(1, 2)}).sum
    near((loss.sum - kl).detach(), -3.0)
    near(torch.autograd.grad(loss.sum - kl, lp)[0], [[-2.0, -1.0]])
    dropped = GRPO(GRPOConfig(correction={"mode": "token", "kind": "mask"})).actor_loss(lp, None, data)
    near(dropped.sum.detach(), -1.0)
    near(dropped.count, 2)


def test_clipped_fractions_are_weighted_by_tokens():
    lp = torch.log(torch.tensor([[1.5, 1.0, 5.0, 1.0]]))
    data = columns([[1.0, 1.0, -1.0, 9.0]], [[True, True, True, False]], old_log_probs=[[0.0] * 4])
    metrics = GRPO(GRPOConfig()).actor_loss(lp, None, data).metrics
    near(torch.stack(metrics["actor/clip_frac"]), [1, 3])
    near(torch.stack(metrics["actor/clip_frac_lower"]), [1, 3])
    near(metrics["actor/ratio/max"][0], 5)


@pytest.mark.parametrize("shape", [(0, 0), (2, 0), (2, 3)])
def test_a_micro_batch_without_tokens(shape):
    lp = torch.full(shape, NAN, requires_grad=True)
    data = {n: torch.full(shape, NAN) for n in ("advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs")}
    data["response_mask"] = torch.zeros(shape, dtype=torch.bool)
    for algorithm in ALGORITHMS.values():
        loss = algorithm.actor_loss(lp, torch.full(shape, NAN, requires_grad=True), data)
        near(loss.sum.detach(), 0.0)
        near(loss.count, 0.0)
        assert torch.equal(torch.autograd.grad(loss.sum, lp)[0], torch.zeros(shape))


def test_what_is_missing_is_named():
    lp = torch.zeros(1, 1)
    with pytest.raises(MissingField, match="ref_log_probs"):
        GRPO(GRPOConfig(kl_coef=0.1)).actor_loss(lp, None, columns([[1.0]]))
    with pytest.raises(MissingField, match="rollout_log_probs"):
        GRPO(GRPOConfig(correction={"mode": "token"})).actor_loss(lp, None, columns([[1.0]]))
    with pytest.raises(MissingField, match="response_mask"):
        GRPO(GRPOConfig()).actor_loss(lp, None, {})
    with pytest.raises(ShapeError, match="log_probs"):
        GRPO(GRPOConfig()).actor_loss(torch.zeros(1, 2), None, columns([[1.0]]))
    with pytest.raises(AssertionError, match="entropy"):
        GRPO(GRPOConfig(entropy_coef=0.1)).actor_loss(lp, None, columns([[1.0]]))


def test_low_precision_log_probs_are_computed_in_float32():
    lp = torch.tensor([[-1.0]], dtype=torch.bfloat16, requires_grad=True)
    loss = GRPO(GRPOConfig()).actor_loss(lp, None, columns([[1.0]]))
    assert loss.sum.dtype == torch.float32


def test_correction_is_on_where_sampler_and_trainer_round_apart() -> None:
    algorithm = GRPO(GRPOConfig())
    assert algorithm.correction.mode == "none"
    algorithm.rollout_rounds_apart = True
    assert algorithm.correction.mode == "token"
    assert GRPO(GRPOConfig(correction={"mode": "none"})).correction.mode == "none"
