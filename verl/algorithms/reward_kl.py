"""The KL from the reference as a cost in the reward, with a coefficient that may be steered; or in the loss.

In come a step's token rewards and log-probs, out go rewards less the penalty. What is made of them is the
algorithm's file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import Self

from verl.algorithms.base import changed, clean
from verl.algorithms.clipped_policy import ClippedPolicy, ClippedPolicyConfig
from verl.algorithms.credit import Credit
from verl.algorithms.kl import AdaptiveKL, FixedKL, KLEstimator, kl_estimate
from verl.algorithms.masked import masked_mean
from verl.batch import Batch


class RewardKLConfig(ClippedPolicyConfig):
    """Keys of algorithms that may have the KL in the reward."""

    kl_in: Literal["reward", "loss"] = "reward"
    """Where the KL divergence from the reference counts."""
    kl_target: float | None = Field(default=None, gt=0)
    """KL a token, in nats, that kl_coef is steered towards from step to step; null keeps kl_coef fixed."""
    kl_horizon: float = Field(default=10000.0, gt=0)
    """Responses over which that steering takes full effect."""

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


RewardKLT = TypeVar("RewardKLT", bound=RewardKLConfig)


class RewardKLPolicy(ClippedPolicy[RewardKLT]):
    """A clipped policy whose token rewards may carry the KL; holds its coefficient."""

    def __init__(self, config: RewardKLT) -> None:
        super().__init__(config)
        coef, target = config.reward_kl_coef, config.kl_target
        self.kl = FixedKL(coef) if target is None else AdaptiveKL(coef, target, config.kl_horizon)

    @property
    def needs(self) -> frozenset[str]:
        """With a KL the reference; with the KL in the reward also the old policy's log-probs."""
        old = {"old_log_probs"} if self.config.reward_kl_coef > 0 else set()
        return super().needs | old

    def penalised(self, credit: Credit, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Token rewards [B, R] less coefficient * KL_t (old policy, reference), and metrics of it.

        The coefficient is moved by the KL that was seen: call it once a step. Raises MissingField.
        """
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

    def state_dict(self) -> dict[str, Any]:
        """The steered KL coefficient, if it is steered."""
        return self.kl.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the steered KL coefficient."""
        self.kl.load_state_dict(state)
