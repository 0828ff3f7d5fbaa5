"""SFT: the policy learns to say the answers that it is shown. No reward, no reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from verl.algorithms.aggregate import aggregate
from verl.algorithms.base import Algorithm, AlgorithmConfig, Loss, clean
from verl.algorithms.clipped_policy import response_mask


class SFTConfig(AlgorithmConfig):
    """Keys of SFT."""

    name: Literal["sft"] = "sft"
    """Entry of the algorithm table."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean"] = "token-mean"
    """What the loss is averaged over: all learned tokens of the step, or each example first."""


class SFT(Algorithm[SFTConfig]):
    """Supervised fine-tuning: the mean negative log-prob of the answers' tokens.

    loss = -log p(token | what stands before it) on each token that ``response_mask`` marks: the assistant's turns with
    the tokens that end them. Other turns are read, not learned. Log-probs are at the temperature 1.
    Source: Ouyang et al. 2022 (InstructGPT), arXiv:2203.02155, section 3.5; the mask of the assistant's turns is the
    field's.
    """

    Config: ClassVar[type[AlgorithmConfig]] = SFTConfig
    family: ClassVar[str] = "supervised"

    @property
    def needs(self) -> frozenset[str]:
        """Nothing beside the examples."""
        return frozenset()

    @property
    def trains(self) -> tuple[str, ...]:
        """The actor."""
        return ("actor",)

    def actor_loss(self, log_probs: Tensor, entropy: Tensor | None, columns: Mapping[str, Tensor]) -> Loss:
        """As in Algorithm; reads ``response_mask`` alone."""
        mask = response_mask(columns)
        losses = -clean(log_probs, mask, "log_probs")
        total, count = aggregate(losses, mask, self.config.loss_aggregation)
        tokens = mask.sum().float()
        metrics = {
            "actor/loss": (total.detach(), count),
            "actor/learned_tokens/sum": (tokens, torch.ones_like(tokens)),
        }
        if entropy is not None:
            metrics["actor/entropy"] = (clean(entropy.detach(), mask, "entropy").sum(), tokens)
        return Loss(total, count, metrics)
