"""KTO: single answers, each desirable or not, teach the policy without pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from verl.algorithms.base import AlgorithmConfig, Loss
from verl.algorithms.preference import Preference, PreferenceConfig, entropy_metric, log_ratios, loss_of, mean_of
from verl.batch import FIELDS
from verl.common.errors import MissingField


class KTOConfig(PreferenceConfig):
    """Keys of KTO."""

    name: Literal["kto"] = "kto"
    """Entry of the algorithm table."""
    desirable_weight: float = Field(default=1.0, ge=0)
    """Weight of a desirable answer. With n answers of each kind, weight * n of the one should be 1 to 4/3 times that of
    the other."""
    undesirable_weight: float = Field(default=1.0, ge=0)
    """Weight of an undesirable answer."""


class KTO(Preference[KTOConfig]):
    """Kahneman-Tversky optimisation.

    r = sum over the response of log_prob - ref_log_prob; z = kl_estimate, the KL of the policy from the reference
    desirable:   desirable_weight * (1 - sigmoid(beta (r - z)))
    undesirable: undesirable_weight * (1 - sigmoid(beta (z - r)))
    The mean over answers; one without a token takes no part. z is the mean of r over prompts that meet answers to other
    prompts, at least 0, without gradient: one number a step, from all its rows.
    Source: Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7 to 9.
    """

    Config: ClassVar[type[AlgorithmConfig]] = KTOConfig
    is_paired: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[str]:
        """The reference's log-probs and, of mismatched answers, an estimate of the KL."""
        return frozenset({"starting_policy", "kl_estimate"})

    def actor_loss(self, log_probs: Tensor, entropy: Tensor | None, columns: Mapping[str, Tensor]) -> Loss:
        """As in Algorithm: needs ``ref_log_probs``, ``is_chosen`` and ``kl_estimate``."""
        for name in ("is_chosen", "kl_estimate"):
            if name not in columns:
                raise MissingField(f"the loss needs column {name!r}: {FIELDS[name].written_by} writes it")
        config, is_chosen = self.config, columns["is_chosen"].bool()
        rows = log_ratios(log_probs, columns)
        counts = rows.tokens > 0
        kl = columns["kl_estimate"].detach().float()
        gain = torch.where(is_chosen, rows.ratio - kl, kl - rows.ratio)
        weight = torch.where(is_chosen, config.desirable_weight, config.undesirable_weight)
        losses = weight * (1 - torch.sigmoid(config.beta * gain))
        good, bad = counts & is_chosen, counts & ~is_chosen
        reward = config.beta * rows.ratio
        metrics = {
            "actor/kl_estimate": mean_of(kl, counts),
            "actor/chosen_reward": mean_of(reward, good),
            "actor/rejected_reward": mean_of(reward, bad),
            "actor/chosen_log_prob": mean_of(rows.log_prob, good),
            "actor/rejected_log_prob": mean_of(rows.log_prob, bad),
        }
        return loss_of(losses, counts, metrics | entropy_metric(entropy, columns))

    def derived(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """`actor/margin`: the mean reward of desirable answers less that of the others, where there are both."""
        names = ("actor/chosen_reward", "actor/rejected_reward")
        return {"actor/margin": metrics[names[0]] - metrics[names[1]]} if all(n in metrics for n in names) else {}
