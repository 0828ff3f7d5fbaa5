"""What every algorithm offers: which passes it needs, which roles it trains, advantages, losses.

In come a ``Batch`` of one step, then the padded columns of its micro-batches; out go advantages and losses as
(sum, count). An algorithm doesn't know how its losses are cut into micro-batches or spread over ranks.

Shape letters: B rows, R response tokens of the longest row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from verl.batch import FIELDS, Batch
from verl.common.errors import ConfigError, MissingField, ShapeError
from verl.common.section import Section

Metrics = dict[str, tuple[Tensor, Tensor]]


class AlgorithmConfig(Section):
    """Base of every algorithm's keys; a variant declares its own beside its code."""

    name: str
    """Entry of the algorithm table."""

    def ineffective_keys(self) -> list[str]:
        """Keys that the user changed and that do nothing beside the other keys, each as ``"key (reason)"``."""
        return []


@dataclass(frozen=True)
class Loss:
    """A loss that nobody has divided yet.

    sum      scalar, differentiable: summed over the rows of this micro-batch
    count    scalar, no gradient: what the sum stands for. The engine adds up counts over all micro-batches and ranks
             of the update and divides once, by ``divisor`` of the total.
    metrics  name -> (sum, count), detached; means are sum / count over everything. A name that ends in ``/max`` or
             ``/min`` holds (value, count) and is reduced by max or min.
    """

    sum: Tensor
    count: Tensor
    metrics: Metrics = field(default_factory=dict)

    @staticmethod
    def divisor(total_count: Tensor) -> Tensor:
        """What to divide the summed gradients by: the total count, or 1 where it is 0.

        A total of 0 means that there was no token to train on (the sum is 0 too) or that the loss is a plain sum
        ("token-sum").
        """
        return torch.where(total_count > 0, total_count, torch.ones_like(total_count))


ConfigT = TypeVar("ConfigT", bound=AlgorithmConfig)


class Algorithm(ABC, Generic[ConfigT]):
    """One way to a loss. Holds its config and no tensors."""

    Config: ClassVar[type[AlgorithmConfig]]
    family: ClassVar[str]
    """Which kind of run it is for: on_policy, preference or supervised."""

    def __init__(self, config: ConfigT) -> None:
        self.config = config
        self.rollout_rounds_apart = False
        """Whether sampler and trainer compute a log-prob to different roundings that matter: set by who assembles."""
        self.max_response_tokens: int | None = None
        """Longest response that the rollout gives: set by who assembles; None where nothing is sampled."""

    @property
    @abstractmethod
    def needs(self) -> frozenset[str]:
        """Of {"critic", "reference", "old_log_probs", "greedy_scores", "starting_policy", "kl_estimate"}: what must be
        there before the losses."""

    @property
    @abstractmethod
    def trains(self) -> tuple[str, ...]:
        """The roles to update, in order."""

    def trains_in(self, step: int) -> tuple[str, ...]:
        """Those of ``trains`` that ``step``, counted from 1, updates: all, where a variant doesn't say otherwise."""
        return self.trains

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether ``actor_loss`` must be given an entropy that carries a gradient."""
        return False

    def actor_loss(self, log_probs: Tensor, entropy: Tensor | None, columns: Mapping[str, Tensor]) -> Loss:
        """The policy's loss on one micro-batch.

        log_probs  [B, R] float  of the response tokens under the actor now, with gradient
        entropy    [B, R] float  of the distribution of each token, or None where nobody computed it
        columns    [B, R] padded columns of the batch, and its [B] ones
        Raises MissingField and ShapeError.
        """
        raise self._trains_no("actor")

    def critic_loss(self, values: Tensor, columns: Mapping[str, Tensor]) -> Loss:
        """The critic's loss on one micro-batch; values [B, R] float with gradient."""
        raise self._trains_no("critic")

    def score_loss(self, scores: Tensor, columns: Mapping[str, Tensor]) -> Loss:
        """The reward model's loss on one micro-batch; scores [B, R] float of each row up to each token, with
        gradient."""
        raise self._trains_no("reward model")

    def derived(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Further metrics of a step that follow from those of the losses."""
        return {}

    def _trains_no(self, role: str) -> ConfigError:
        return ConfigError(f"algorithm {self.config.name!r} has no {role} to train; it trains {', '.join(self.trains)}")

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know besides the config."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state_dict`` gave."""


class OnPolicyAlgorithm(Algorithm[ConfigT]):
    """One way from scores to losses. Without ``old_log_probs`` in a batch the actor now is the old one."""

    family: ClassVar[str] = "on_policy"
    min_group_size: ClassVar[int] = 1
    """Responses a prompt below which the algorithm can't learn."""

    @property
    def max_generations(self) -> int:
        """Batches of prompts that a step draws at most, where ``keeps`` drops rows."""
        return 1

    def keeps(self, batch: Batch) -> Tensor | None:
        """[B] bool: the rows of scored groups that are worth training on, whole groups; None: all, whatever they are.

        For the others the trainer draws further prompts, up to ``max_generations`` batches a step. ``batch`` stays as
        it is.
        """
        return None

    @abstractmethod
    def advantages(self, batch: Batch) -> dict[str, float]:
        """Write ``token_rewards``, ``advantages`` and ``returns`` into ``batch``; returns the metrics of the step.

        Rows without a valid score leave the losses: their ``response_mask`` is written as False.
        Raises MissingField when a pass that the algorithm ``needs`` hasn't been made.
        """


def changed(section: Section, key: str) -> bool:
    """Whether the user gave ``key`` a value other than its default; a saved config sets every key."""
    return section.is_set(key) and getattr(section, key) != type(section).model_fields[key].default


def take(columns: Mapping[str, Tensor], name: str, mask: Tensor) -> Tensor:
    """Column ``name`` as float32 [B, R], 0 outside ``mask`` whatever stood there, without gradient to it.

    Raises MissingField naming who writes it, ShapeError when it doesn't fit the mask.
    """
    if name not in columns:
        raise MissingField(f"the loss needs column {name!r}: {FIELDS[name].written_by} writes it")
    return clean(columns[name].detach(), mask, name)


def clean(values: Tensor, mask: Tensor, name: str) -> Tensor:
    """``values`` as float32, 0 outside ``mask``: what stands there reaches neither sums nor gradients."""
    if values.shape != mask.shape:
        raise ShapeError(f"{name} is {list(values.shape)}, the response mask is {list(mask.shape)}")
    return torch.where(mask, values.float(), 0.0)
