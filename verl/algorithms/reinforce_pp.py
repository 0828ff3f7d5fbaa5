"""REINFORCE++: discounted returns of tokens, whitened over the whole step. No critic, no groups."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from verl.algorithms.base import AlgorithmConfig
from verl.algorithms.gae import gae
from verl.algorithms.masked import whiten
from verl.algorithms.outcome import read_outcome, write_advantages
from verl.algorithms.reward_kl import RewardKLConfig, RewardKLPolicy
from verl.batch import Batch


class ReinforcePPConfig(RewardKLConfig):
    """Keys of REINFORCE++."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    """Entry of the algorithm table."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount a sampled token. The score comes once, at the end: below 1, early tokens of long responses lose it."""


class ReinforcePP(RewardKLPolicy[ReinforcePPConfig]):
    """REINFORCE with what made PPO work, less its critic.

    r_t = [t is last] * score - kl_coef * KL_t (old policy against reference)
    R_t = r_t + gamma * R_next(t), next(t) being the next *sampled* token
    A_t = (R_t - mean) / sqrt(var + 1e-8), both over all sampled tokens of the step; 0 if all are equal
    Source: Hu et al. 2025, arXiv:2501.03262.
    """

    Config: ClassVar[type[AlgorithmConfig]] = ReinforcePPConfig

    def advantages(self, batch: Batch) -> dict[str, float]:
        """As in Algorithm; ``returns`` are R_t."""
        outcome = read_outcome(batch, self.overlong)
        mask = outcome.credit.mask
        rewards, metrics = self.penalised(outcome.credit, batch)
        returns, _ = gae(torch.zeros_like(rewards), rewards, mask, gamma=self.config.gamma, gae_lambda=1.0)
        return metrics | write_advantages(batch, outcome, rewards, whiten(returns, mask), returns)
