"""RLOO: a response's baseline is the mean score of the other responses to its prompt. No critic."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from torch import Tensor

from verl.algorithms.base import AlgorithmConfig
from verl.algorithms.group import GroupStats
from verl.algorithms.outcome import groups_of, over_tokens, read_outcome, write_advantages
from verl.algorithms.reward_kl import RewardKLConfig, RewardKLPolicy
from verl.batch import Batch


class RLOOConfig(RewardKLConfig):
    """Keys of RLOO."""

    name: Literal["rloo"] = "rloo"
    """Entry of the algorithm table."""


class RLOO(RewardKLPolicy[RLOOConfig]):
    """REINFORCE with a leave-one-out baseline.

    s_i = score_i - kl_coef * sum over the response of KL_t (old policy against reference)
    A_i = s_i - mean of the group's other s_j = n / (n - 1) * (s_i - mean(group))
    on every sampled token of response i. Equal members, and one that is alone, have advantage 0.
    Source: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"; Ahmadian et al. 2024,
    arXiv:2402.14740, for language models. They make one update a batch, where the ratio is 1; further updates are
    clipped as PPO's.
    """

    Config: ClassVar[type[AlgorithmConfig]] = RLOOConfig
    min_group_size: ClassVar[int] = 2

    def advantages(self, batch: Batch) -> dict[str, float]:
        """As in Algorithm; ``returns`` are the advantages."""
        outcome = read_outcome(batch, self.overlong)
        credit = outcome.credit
        rewards, metrics = self.penalised(credit, batch)
        if rewards is not credit.token_rewards:  # an empty response has its score, and no token to hold it
            scores = credit.scores + (rewards - credit.token_rewards).sum(1)
            outcome = replace(outcome, groups=groups_of(batch, credit, scores))
        advantages = over_tokens(leave_one_out(outcome.groups), credit.mask)
        return metrics | write_advantages(batch, outcome, rewards, advantages, advantages)


def leave_one_out(groups: GroupStats) -> Tensor:
    """[B] float64: each row's score minus the mean of the others of its group; 0 where there is no other."""
    return groups.centred * groups.size / (groups.size - 1).clamp(min=1)
