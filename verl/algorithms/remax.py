"""ReMax: a response's baseline is the score of the greedy response to its prompt. No critic, no groups."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from verl.algorithms.base import AlgorithmConfig
from verl.algorithms.gae import gae
from verl.algorithms.outcome import read_outcome, write_advantages
from verl.algorithms.reward_kl import RewardKLConfig, RewardKLPolicy
from verl.batch import Batch


class ReMaxConfig(RewardKLConfig):
    """Keys of ReMax."""

    name: Literal["remax"] = "remax"
    """Entry of the algorithm table."""


class ReMax(RewardKLPolicy[ReMaxConfig]):
    """REINFORCE with the greedy response's score as baseline.

    r_t = [t is last] * score - kl_coef * KL_t (old policy against reference)
    R_t = sum of r over the sampled tokens from t on
    A_t = R_t - b, b being the score of one greedy response to the same prompt
    Rows whose baseline is missing (its reward failed) take no part.
    Source: Li et al. 2023, arXiv:2310.10505, algorithm 2. It makes one update a batch, where the ratio is 1; further
    updates are clipped as PPO's.
    """

    Config: ClassVar[type[AlgorithmConfig]] = ReMaxConfig

    @property
    def needs(self) -> frozenset[str]:
        """Greedy scores, and what a KL needs."""
        return super().needs | {"greedy_scores"}

    def advantages(self, batch: Batch) -> dict[str, float]:
        """As in Algorithm; ``returns`` are R_t."""
        baseline = batch["greedy_scores"]
        outcome = read_outcome(batch, self.overlong, torch.isfinite(baseline))
        mask = outcome.credit.mask
        rewards, metrics = self.penalised(outcome.credit, batch)
        returns, _ = gae(torch.zeros_like(rewards), rewards, mask, gamma=1.0, gae_lambda=1.0)
        advantages = torch.where(mask, returns - baseline.to(mask.device)[:, None], 0.0)
        return metrics | write_advantages(batch, outcome, rewards, advantages, returns)
