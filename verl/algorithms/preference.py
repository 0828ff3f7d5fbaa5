"""What losses on judged answers share: how much more likely than under the reference an answer has become.

In come log-probs and columns of a micro-batch, out go sums over each row. Knows no particular loss.

Shape letters: B rows, R response tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from verl.algorithms.base import Algorithm, AlgorithmConfig, Loss, clean, take
from verl.algorithms.clipped_policy import response_mask
from verl.algorithms.masked import ROUNDING, masked_sum


class PreferenceConfig(AlgorithmConfig):
    """Keys of every loss on judged answers."""

    beta: float = Field(default=0.1, gt=0)
    """How strongly the policy is held to the reference: a reward is beta times the log-ratio to it."""


PreferenceT = TypeVar("PreferenceT", bound=PreferenceConfig)


class Preference(Algorithm[PreferenceT]):
    """A loss on answers that somebody judged, of a policy and a frozen reference."""

    family: ClassVar[str] = "preference"
    is_paired: ClassVar[bool]
    """Whether it compares pairs of answers, or takes single ones with a label."""

    @property
    def needs(self) -> frozenset[str]:
        """The reference's log-probs: those of the starting policy."""
        return frozenset({"starting_policy"})

    @property
    def trains(self) -> tuple[str, ...]:
        """The actor."""
        return ("actor",)


@dataclass(frozen=True)
class LogRatios:
    """Sums over the response tokens of each row; all [B].

    ratio      log-prob minus the reference's, with gradient
    log_prob   under the policy, detached
    tokens     int64: response tokens
    """

    ratio: Tensor
    log_prob: Tensor
    tokens: Tensor

    @property
    def rounding(self) -> Tensor:
        """[B]: what float32 can make of a ratio that is 0."""
        size = self.log_prob.abs() * 2 + self.ratio.detach().abs()
        return ROUNDING * size


def log_ratios(log_probs: Tensor, columns: Mapping[str, Tensor]) -> LogRatios:
    """Of each row, over the tokens that ``response_mask`` marks; the prompt is in neither sum.

    log_probs  [B, R] float with gradient
    columns    response_mask, ref_log_probs [B, R]
    Raises MissingField and ShapeError.
    """
    mask = response_mask(columns)
    policy = clean(log_probs, mask, "log_probs")
    ratio = masked_sum(policy - take(columns, "ref_log_probs", mask), mask, dim=1)
    return LogRatios(ratio, masked_sum(policy.detach(), mask, dim=1), mask.sum(1))


def entropy_metric(entropy: Tensor | None, columns: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """`actor/entropy`, where somebody computed it; [B, R]."""
    if entropy is None:
        return {}
    mask = response_mask(columns)
    return {"actor/entropy": (clean(entropy.detach(), mask, "entropy").sum(), mask.sum().float())}


def mean_of(values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """A metric: the mean of ``values`` where ``counts`` is True, as (sum, count)."""
    return masked_sum(values.detach().float(), counts), counts.sum().float()


def loss_of(losses: Tensor, counts: Tensor, metrics: Mapping[str, tuple[Tensor, Tensor]]) -> Loss:
    """The mean of ``losses`` where ``counts`` is True, with itself among the metrics."""
    total, count = masked_sum(losses, counts), counts.sum().float()
    return Loss(total, count, {"actor/loss": (total.detach(), count), **metrics})


def is_win(margin: Tensor, rounding: Tensor) -> Tensor:
    """Bool: whether a margin is above 0 by more than rounding. A tie is no win."""
    return margin.detach() > torch.clamp(rounding, min=0)
