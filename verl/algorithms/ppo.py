"""PPO: a critic's values and generalised advantage estimation; KL from the reference in the reward or in the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from verl.algorithms.base import AlgorithmConfig, Loss, clean, take
from verl.algorithms.clipped_policy import response_mask
from verl.algorithms.credit import assign_credit, credit_metrics
from verl.algorithms.gae import gae
from verl.algorithms.group import group_metrics, group_stats
from verl.algorithms.masked import masked_mean, masked_sum, masked_var, varies, whiten
from verl.algorithms.reward_kl import RewardKLConfig, RewardKLPolicy
from verl.algorithms.value_loss import clipped_value_loss
from verl.batch import Batch


class PPOConfig(RewardKLConfig):
    """Keys of PPO."""

    name: Literal["ppo"] = "ppo"
    """Entry of the algorithm table."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount a sampled token. The score comes once, at the end: below 1, early tokens of long responses lose it."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """Share of the real return against the critic's guess. 1 takes no bias from a critic that starts untrained."""
    value_clip: float | None = Field(default=0.5, gt=0)
    """How far a value may move from the one before the update, in reward units; null switches it off."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """Steps at the start that train the critic alone: the policy doesn't learn from an untrained one's guesses."""
    whiten_advantages: bool = True
    """Give the advantages of a step mean 0 and variance 1 over all its sampled tokens."""


class PPO(RewardKLPolicy[PPOConfig]):
    """Proximal policy optimisation with a critic.

    token_rewards = score on the last sampled token - kl_coef * KL_t (old policy against reference), and
    advantages, returns = gae(values, token_rewards); the advantages whitened over the step, the returns not.
    Source: Schulman et al. 2017, arXiv:1707.06347; Ouyang et al. 2022, arXiv:2203.02155, for the KL in the reward.
    """

    Config: ClassVar[type[AlgorithmConfig]] = PPOConfig

    @property
    def needs(self) -> frozenset[str]:
        """The critic; with a KL the reference; with the KL in the reward also the old policy's log-probs."""
        return super().needs | {"critic"}

    @property
    def trains(self) -> tuple[str, ...]:
        """The critic, then the actor."""
        return ("critic", "actor")

    def trains_in(self, step: int) -> tuple[str, ...]:
        """As in Algorithm: the critic alone while it warms up."""
        return ("critic",) if step <= self.config.critic_warmup_steps else self.trains

    def advantages(self, batch: Batch) -> dict[str, float]:
        """As in Algorithm; returns are the critic's targets, before whitening."""
        credit = assign_credit(batch, self.overlong)
        rewards, metrics = self.penalised(credit, batch)
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


def value_metrics(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
    """Mean return and, where the returns vary, the part of their variance that the values explain."""
    metrics = {"critic/returns/mean": float(masked_mean(returns, mask))}
    if bool(varies(returns, mask)):
        unexplained = masked_var((returns - values).double(), mask) / masked_var(returns.double(), mask)
        metrics["critic/explained_variance"] = 1 - float(unexplained)
    return metrics
