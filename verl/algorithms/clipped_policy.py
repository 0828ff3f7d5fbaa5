"""The actor's side of the PPO family: ratio clipping, KL and entropy terms, rollout correction, one aggregation.

In come log-probs and the columns of a micro-batch, out goes a ``Loss``. Where advantages come from is the
algorithm's file; a variant with another surrogate writes ``policy_terms`` of its own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from verl.algorithms.aggregate import Aggregation, aggregate, for_metric
from verl.algorithms.base import AlgorithmConfig, Loss, Metrics, OnPolicyAlgorithm, changed, clean, take
from verl.algorithms.correction import CorrectionConfig, correction_weights, rollout_diff
from verl.algorithms.kl import KLEstimator, kl_estimate
from verl.algorithms.masked import masked_max, masked_min, masked_sum
from verl.algorithms.overlong import OverlongConfig, Ramp
from verl.algorithms.policy_loss import PolicyTerms, clipped_ratio_loss
from verl.common.errors import MissingField


class RatioPolicyConfig(AlgorithmConfig):
    """Keys that the whole on-policy family shares."""

    formerly: ClassVar[dict[str, str]] = {"loss_norm_tokens": "it is rollout.max_response_tokens"}

    clip_low: float = Field(default=0.2, gt=0, le=1)
    """How far below 1 the probability ratio of a token may fall before its gradient stops."""
    clip_high: float = Field(default=0.2, gt=0)
    """How far above 1 the ratio may rise; DAPO's clip-higher uses 0.28."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus, in loss per nat."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference, per nat; 0 needs no reference model."""
    kl_estimator: KLEstimator | None = None
    """Estimator of that divergence; null is k1 in the reward and k3 in the loss."""
    loss_aggregation: Aggregation = "token-mean"
    """What losses of tokens are averaged over: all tokens of the update, or each response first; with -norm each
    response's sum over rollout.max_response_tokens."""
    correction: CorrectionConfig = CorrectionConfig()
    """Weights for rollout log-probs that differ from training log-probs."""
    overlong: OverlongConfig = OverlongConfig()
    """What a response's score loses as its length nears the limit."""

    @property
    def loss_kl_coef(self) -> float:
        """Weight of the KL in the actor's loss."""
        return self.kl_coef

    @property
    def estimator(self) -> KLEstimator:
        """The KL estimator in use."""
        return self.kl_estimator or "k3"

    def ineffective_keys(self) -> list[str]:
        """As in AlgorithmConfig."""
        found = self.correction.ineffective_keys() + self.overlong.ineffective_keys()
        if self.kl_coef == 0 and changed(self, "kl_estimator"):
            found.append("kl_estimator (kl_coef is 0)")
        if self.loss_kl_coef > 0 and self.estimator == "k1":
            found.append("kl_estimator (the gradient of k1 in the loss is 0 on average: use k1+, k2 or k3)")
        return found


RatioT = TypeVar("RatioT", bound=RatioPolicyConfig)


class RatioPolicy(OnPolicyAlgorithm[RatioT]):
    """An algorithm whose actor weighs advantages by the ratio of the policy now to the old one.

    Unless a variant says otherwise it trains the actor alone and has its KL, if any, in the loss.
    """

    @property
    def needs(self) -> frozenset[str]:
        """The reference, where its KL has a weight."""
        return frozenset({"reference"}) if self.config.kl_coef > 0 else frozenset()

    @property
    def trains(self) -> tuple[str, ...]:
        """The actor alone."""
        return ("actor",)

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the entropy bonus has a weight."""
        return self.config.entropy_coef > 0

    @property
    def overlong(self) -> Ramp | None:
        """Where scores fall as a response nears the limit; None: nowhere."""
        return self.config.overlong.ramp(self.max_response_tokens)

    def actor_loss(self, log_probs: Tensor, entropy: Tensor | None, columns: Mapping[str, Tensor]) -> Loss:
        """The policy's loss on one micro-batch: surrogate * correction + kl_coef * KL - entropy_coef * entropy.

        log_probs  [B, R] float  of the response tokens under the actor now, with gradient
        entropy    [B, R] float  with gradient where entropy_coef > 0, else for the metric only; None: no metric
        columns    [B, R]        advantages and response_mask; old_log_probs (absent: the actor now, ratio 1);
                                 rollout_log_probs (for the metrics, and needed by the correction); ref_log_probs
                                 (needed by a KL in the loss)
        All terms are aggregated the same way, so one count holds for the sum. Raises MissingField and ShapeError.
        """
        mask = response_mask(columns)
        now = clean(log_probs, mask, "log_probs")
        old = take(columns, "old_log_probs", mask) if "old_log_probs" in columns else now.detach()
        terms = self.policy_terms(now, old, take(columns, "advantages", mask), mask)
        weighted, metrics = self._corrected(terms.loss, old, columns, mask)
        total, count = self._aggregate(weighted, mask)
        metrics |= ratio_metrics(terms, old - now.detach(), mask)
        metrics["actor/policy_loss"] = self._metric(weighted, mask)
        if "ref_log_probs" in columns or self.config.loss_kl_coef > 0:
            kl = kl_estimate(now, take(columns, "ref_log_probs", mask), self.config.estimator)
            metrics["actor/kl"] = over_tokens(kl, mask)  # nats a token, however the loss is aggregated
            if self.config.loss_kl_coef > 0:
                total = total + self.config.loss_kl_coef * self._aggregate(kl, mask)[0]
        if entropy is not None:
            entropy = clean(entropy, mask, "entropy")
            metrics["actor/entropy"] = over_tokens(entropy, mask)
        if self.needs_entropy_gradient:
            assert entropy is not None, "entropy_coef > 0 needs the entropy of each token"
            assert entropy.requires_grad or not log_probs.requires_grad, "entropy_coef > 0 needs the entropy's gradient"
            total = total - self.config.entropy_coef * self._aggregate(entropy, mask)[0]
        return Loss(total, count, metrics)

    @abstractmethod
    def policy_terms(self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> PolicyTerms:
        """The surrogate of each token; all [B, R] and 0 outside ``mask``."""

    @property
    def correction(self) -> CorrectionConfig:
        """The rollout correction in use: the config's, with its auto decided."""
        chosen = self.config.correction
        if chosen.mode != "auto":
            return chosen
        return chosen.model_copy(update={"mode": "token" if self.rollout_rounds_apart else "none"})

    def _corrected(
        self, loss: Tensor, old: Tensor, columns: Mapping[str, Tensor], mask: Tensor
    ) -> tuple[Tensor, Metrics]:
        correction = self.correction
        is_on = correction.mode != "none"
        if not is_on and "rollout_log_probs" not in columns:
            return loss, {}
        rollout = take(columns, "rollout_log_probs", mask)
        metrics = rollout_diff(old, rollout, mask)
        if is_on:
            weights, more = correction_weights(old, rollout, mask, correction)
            return loss * weights, metrics | more
        return loss, metrics

    def _aggregate(self, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return aggregate(values, mask, self.config.loss_aggregation, self.max_response_tokens)

    def _metric(self, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        how = for_metric(self.config.loss_aggregation)
        return aggregate(values.detach(), mask, how, self.max_response_tokens)


class ClippedPolicyConfig(RatioPolicyConfig):
    """The shared keys and those of PPO's surrogate."""

    dual_clip: float | None = Field(default=3.0, gt=1)
    """Largest ratio that a token of negative advantage counts with; null switches it off."""


ClippedT = TypeVar("ClippedT", bound=ClippedPolicyConfig)


class ClippedPolicy(RatioPolicy[ClippedT]):
    """An algorithm whose actor minimises PPO's clipped surrogate, a ratio a token."""

    def policy_terms(self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> PolicyTerms:
        """As in RatioPolicy: ``clipped_ratio_loss`` of single tokens."""
        c = self.config
        return clipped_ratio_loss(
            log_probs,
            old_log_probs,
            advantages,
            clip_low=c.clip_low,
            clip_high=c.clip_high,
            dual_clip=c.dual_clip,
        )


def response_mask(columns: Mapping[str, Tensor]) -> Tensor:
    """The micro-batch's mask. Raises MissingField."""
    if "response_mask" not in columns:
        raise MissingField("the loss needs column 'response_mask': rollout writes it")
    return columns["response_mask"].bool()


def ratio_metrics(terms: PolicyTerms, old_minus_now: Tensor, mask: Tensor) -> Metrics:
    """Of the sampled tokens: the ratio, what was clipped, and k1 of KL(old policy || policy now)."""
    tokens = mask.sum().float()
    return {
        "actor/ratio/mean": over_tokens(terms.ratio, mask),
        "actor/ratio/max": (masked_max(terms.ratio, mask), tokens),
        "actor/ratio/min": (masked_min(terms.ratio, mask), tokens),
        "actor/clip_frac": over_tokens(terms.is_clipped, mask),
        "actor/clip_frac_lower": over_tokens(terms.is_clipped_lower, mask),
        "actor/approx_kl": over_tokens(torch.clamp(old_minus_now, -20, 20), mask),
    }


def over_tokens(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """A metric: the mean of ``values`` [B, R] over the tokens where ``mask``, as (sum, count)."""
    return masked_sum(values.detach().float(), mask), mask.sum().float()
