"""PPO: a critic's values and generalised advantage estimation; KL from the reference in the reward or in the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import Self

from verl.algorithms.base import AlgorithmConfig, Loss, changed, clean, take
from verl.algorithms.clipped_policy import ClippedPolicy, ClippedPolicyConfig, response_mask
from verl.algorithms.credit import Credit, assign_credit, credit_metrics
from verl.algorithms.gae import gae
from verl.algorithms.group import group_metrics, group_stats
from verl.algorithms.kl import AdaptiveKL, FixedKL, KLEstimator, kl_estimate
from verl.algorithms.masked import masked_mean, masked_sum, masked_var, varies, whiten
from verl.algorithms.value_loss import clipped_value_loss
from verl.batch import Batch


class PPOConfig(ClippedPolicyConfig):
    """Keys of PPO."""

    name: Literal["ppo"] = "ppo"
    """Entry of the algorithm table."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount a sampled token. The score comes once, at the end: below 1, early tokens of long responses lose it."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """Share of the real return against the critic's guess. 1 takes no bias from a critic that starts untrained."""
    value_clip: float | None = Field(default=0.5, gt=0)
    """How far a value may move from the one before the update, in reward units; null switches it off."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Where the KL divergence from the reference counts."""
    kl_target: float | None = Field(default=None, gt=0)
    """KL a token, in nats, that kl_coef is steered towards from step to step; null keeps kl_coef fixed."""
    kl_horizon: float = Field(default=10000.0, gt=0)
    """Responses over which that steering takes full effect."""
    whiten_advantages: bool = True
    """Give the advantages of a step mean 0 and variance 1 over all its sampled tokens."""

    @property
    def reward_kl_coef(self) -> float:
        """Weight of the KL in the reward, before any steering."""
        return self.kl_coef if self.kl_in == "reward" else 0.0

    @property
    def loss_kl_coef(self) -> float:
        """Weight of the KL in the actor's loss."""
        return self.kl_coef if self.kl_in == "loss" else 0.0

    @property
    def estimator(self) -> KLEstimator:
        """The KL estimator in use: unless given, k1 in the reward and k3 in the loss."""
        return self.kl_estimator or ("k1" if self.kl_in == "reward" else "k3")

    @model_validator(mode="after")
    def _steering_is_possible(self) -> Self:
        if self.kl_target is not None and self.kl_in == "loss":
            raise ValueError("kl_target steers the KL in the reward only: set kl_in to 'reward' or kl_target to null")
        return self

    def ineffective_keys(self) -> list[str]:
        """As in AlgorithmConfig."""
        found = super().ineffective_keys()
        without_kl = ["kl_in", "kl_target"] if self.kl_coef == 0 else []
        found += [f"{key} (kl_coef is 0)" for key in without_kl if changed(self, key)]
        if self.kl_target is None and changed(self, "kl_horizon"):
            found.append("kl_horizon (kl_target is null)")
        if self.reward_kl_coef > 0 and self.estimator.endswith("+"):
            found.append(f"the + of kl_estimator {self.estimator!r} (a KL in the reward has no gradient)")
        return found


class PPO(ClippedPolicy[PPOConfig]):
    """Proximal policy optimisation with a critic.

    token_rewards = score on the last sampled token - kl_coef * KL_t (old policy against reference), and
    advantages, returns = gae(values, token_rewards); the advantages whitened over the step, the returns not.
    Source: Schulman et al. 2017, arXiv:1707.06347; Ouyang et al. 2022, arXiv:2203.02155, for the KL in the reward.
    """

    Config: ClassVar[type[AlgorithmConfig]] = PPOConfig

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        coef, target = config.reward_kl_coef, config.kl_target
        self.kl = FixedKL(coef) if target is None else AdaptiveKL(coef, target, config.kl_horizon)

    @property
    def needs(self) -> frozenset[str]:
        """The critic; with a KL the reference; with the KL in the reward also the old policy's log-probs."""
        reference = {"reference"} if self.config.kl_coef > 0 else set()
        old = {"old_log_probs"} if self.config.reward_kl_coef > 0 else set()
        return frozenset({"critic"} | reference | old)

    @property
    def trains(self) -> tuple[str, ...]:
        """The critic, then the actor."""
        return ("critic", "actor")

    def advantages(self, batch: Batch) -> dict[str, float]:
        """As in Algorithm; returns are the critic's targets, before whitening."""
        credit = assign_credit(batch)
        rewards, metrics = self._penalised(credit, batch)
        values = clean(batch.padded("values"), credit.mask, "values")
        c = self.config
        advantages, returns = gae(values, rewards, credit.mask, gamma=c.gamma, gae_lambda=c.gae_lambda)
        metrics |= value_metrics(values, returns, credit.mask)
        if c.whiten_advantages:
            advantages = whiten(advantages, credit.mask)
        batch.put_padded("token_rewards", rewards)
        batch.put_padded("advantages", advantages)
        batch.put_padded("returns", returns)
        groups = group_stats(credit.scores, batch["group_id"].to(credit.mask.device), credit.keep)
        return metrics | credit_metrics(credit, advantages) | group_metrics(groups)

    def critic_loss(self, values: Tensor, columns: Mapping[str, Tensor]) -> Loss:
        """The critic's clipped regression on one micro-batch, aggregated as the actor's loss.

        values   [B, R] float  of the critic now, with gradient
        columns  [B, R]        returns, response_mask, and values: those before the update
        """
        mask = response_mask(columns)
        now = clean(values, mask, "values")
        old, returns = take(columns, "values", mask), take(columns, "returns", mask)
        loss, is_clipped = clipped_value_loss(now, old, returns, self.config.value_clip)
        total, count = self._aggregate(loss, mask)
        tokens = mask.sum().float()
        metrics = {
            "critic/value_loss": self._metric(loss, mask),
            "critic/clip_frac": (masked_sum(is_clipped.float(), mask), tokens),
            "critic/values/mean": (masked_sum(now.detach(), mask), tokens),
        }
        return Loss(total, count, metrics)

    def state_dict(self) -> dict[str, Any]:
        """The steered KL coefficient, if it is steered."""
        return self.kl.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the steered KL coefficient."""
        self.kl.load_state_dict(state)

    def _penalised(self, credit: Credit, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Token rewards less the KL penalty, and the coefficient moved by the KL that was seen."""
        if self.config.reward_kl_coef == 0:
            return credit.token_rewards, {}
        mask = credit.mask
        old = clean(batch.padded("old_log_probs"), mask, "old_log_probs")
        reference = clean(batch.padded("ref_log_probs"), mask, "ref_log_probs")
        kl = kl_estimate(old, reference, self.config.estimator)
        has_tokens = mask.any(1)
        mean_kl = float(masked_mean(masked_mean(kl, mask, dim=1), has_tokens))
        metrics = {"actor/reward_kl": mean_kl, "actor/kl_coef": self.kl.coef}
        rewards = credit.token_rewards - self.kl.coef * kl
        if rows := int(has_tokens.sum()):
            self.kl.update(mean_kl, rows)
        return rewards, metrics


def value_metrics(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
    """Mean return and, where the returns vary, the part of their variance that the values explain."""
    metrics = {"critic/returns/mean": float(masked_mean(returns, mask))}
    if bool(varies(returns, mask)):
        unexplained = masked_var((returns - values).double(), mask) / masked_var(returns.double(), mask)
        metrics["critic/explained_variance"] = 1 - float(unexplained)
    return metrics
