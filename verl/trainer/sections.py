"""The sections of an on-policy run and the checks that need two of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, SerializeAsAny, field_validator

from verl.algorithms import ALGORITHMS
from verl.algorithms.clipped_policy import RatioPolicyConfig
from verl.engines.config import TrainedConfig
from verl.rewards.config import RewardConfig
from verl.rollout import ROLLOUT_ENGINES
from verl.rollout.config import RolloutConfig
from verl.trainer.base_sections import BaseTrainerConfig, BaseValidationConfig, Run, variant


class TrainerConfig(BaseTrainerConfig):
    """Length of the run, size of a step, what is written where."""

    prompts_per_step: int = Field(32, ge=1)
    """Prompts drawn from the data set for each step."""
    group_size: int = Field(8, ge=1)
    """Responses sampled to each prompt."""
    save_rollouts_every: int | None = Field(1, ge=1)
    """Steps between files of samples with scores and log-probs; null: none."""

    @property
    def rows_per_batch(self) -> int:
        """Prompts of a batch."""
        return self.prompts_per_step


class ValidationConfig(BaseValidationConfig):
    """Scoring `data.val` on a schedule."""

    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    samples_per_prompt: int = Field(1, ge=1)
    """Responses to each prompt; over 1 also reports pass@k."""


class OnPolicyRun(Run):
    """A whole run of the on-policy family (PPO, GRPO and their kin)."""

    family: ClassVar[str] = "on_policy"
    must_say: ClassVar[dict[str, str]] = Run.must_say | {
        "data.train": "data.train, the prompts to train on",
        "reward.name|reward.function|reward.model": "reward.name, .function or .model: what scores a response",
    }
    variants: ClassVar[dict[str, Any]] = {"algorithm": ALGORITHMS, "rollout": ROLLOUT_ENGINES}

    reward: RewardConfig
    """What scores a response."""
    rollout: SerializeAsAny[RolloutConfig] = Field(default_factory=lambda: ROLLOUT_ENGINES.load("native").Config())
    """How responses are sampled, by engine `name`."""
    critic: TrainedConfig = TrainedConfig()
    """The value function, for algorithms that use one."""
    validation: ValidationConfig = ValidationConfig()
    """Scoring held-out prompts."""
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    """Length of the run and its outputs."""

    @field_validator("rollout", mode="before")
    @classmethod
    def _rollout_by_name(cls, value: Any) -> Any:
        return variant({"name": "native", **value} if isinstance(value, Mapping) else value, ROLLOUT_ENGINES, "rollout")

    def roles(self) -> list[str]:
        """The roles that run a model of their own."""
        needs = ALGORITHMS.load(self.algorithm.name)(self.algorithm).needs
        own = ("critic",) if self.model.lora.is_on else ("critic", "reference")
        return ["actor", *(role for role in own if role in needs)]

    def placed_roles(self) -> list[str]:
        """As in Run."""
        return [*self.roles(), "rollout", *(["reward"] if self.reward.model is not None else [])]

    def idle_keys(self) -> dict[str, str]:
        """As in Run."""
        found, roles = super().idle_keys(), self.roles()
        for role in {"critic", "reference"} - set(roles):
            found.setdefault(role, f"algorithm {self.algorithm.name!r} as configured uses no {role}")
        if self.data.val is not None and self.validation.temperature == 0:
            found["validation.samples_per_prompt"] = "validation.temperature is 0, so the samples of a prompt are equal"
        if self.reward.model is not None:
            unused = ("kwargs", "timeout_s", "workers", "cache")
            found |= {f"reward.{key}": "a reward model has no use for it" for key in unused}
        elif self.reward.workers == 0:
            found |= {key: "needs reward.workers above 0" for key in ("reward.timeout_s", "reward.cache")}
        return found

    def conflicts(self) -> list[str]:
        """As in Run."""
        found = super().conflicts()
        algorithm, roles = ALGORITHMS.load(self.algorithm.name), self.roles()
        if self.trainer.group_size < algorithm.min_group_size:
            found.append(
                f"trainer.group_size={self.trainer.group_size} is too small for algorithm.name="
                f"{self.algorithm.name!r}, which compares the responses of a prompt: at least "
                f"{algorithm.min_group_size}"
            )
        if isinstance(self.algorithm, RatioPolicyConfig):
            buffer, limit = self.algorithm.overlong.buffer_tokens, self.rollout.max_response_tokens
            if buffer is not None and buffer > limit:
                found.append(
                    f"algorithm.overlong.buffer_tokens={buffer} is more than rollout.max_response_tokens={limit}, "
                    "before which it is: lower it or raise that key"
                )
        steps = self.trainer.total_steps
        if steps is not None and "actor" not in algorithm(self.algorithm).trains_in(steps):
            found.append(
                f"algorithm {self.algorithm.name!r} as configured leaves the policy as it is for all of "
                f"trainer.total_steps={steps}: lower algorithm.critic_warmup_steps, or raise that key"
            )
        longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        for role in roles:
            budget = getattr(self, role).max_tokens_per_micro_batch
            if longest > budget:
                found.append(
                    f"a row of data.max_prompt_tokens + rollout.max_response_tokens = {longest} tokens doesn't fit "
                    f"{role}.max_tokens_per_micro_batch={budget}: raise that key or lower one of the others"
                )
        rows = self.trainer.prompts_per_step * self.trainer.group_size
        for role in {"actor", "critic"} & set(roles):
            parts = getattr(self, role).mini_batches_per_epoch
            if parts > rows:
                found.append(
                    f"{role}.mini_batches_per_epoch={parts} is more than the {rows} responses of a step "
                    f"(trainer.prompts_per_step × trainer.group_size)"
                )
        return found
