"""Whether a run is still learning: a step's metrics come in, sentences for its owner go out.

Rules look at one metric each, over the steps so far; a metric that a run doesn't have is never complained of. Nothing
is changed or stopped here. ``docs/health.md`` lists the rules.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PATIENCE = 3
"""Steps in a row beyond a limit that make a warning."""
WINDOW = 10
"""Steps of a baseline, the run's first ones, and of the mean that is held against it, the last ones."""
REPEAT = 50
"""Steps before the same warning comes again, if it still holds."""


@dataclass
class Rule(ABC):
    """What to look at, and what to say when it is beyond what is healthy.

    metric  key of metrics.jsonl
    advice  what it means and what to try
    """

    metric: str
    advice: str

    @abstractmethod
    def finding(self, value: float) -> str | None:
        """Take in the value of one more step; what is wrong by now, or None."""


@dataclass
class Limit(Rule):
    """``PATIENCE`` values in a row that are at least ``least``, or at most ``most``, or not finite."""

    least: float = math.inf
    most: float = -math.inf
    patience: int = PATIENCE
    _steps: int = field(default=0, init=False)

    def finding(self, value: float) -> str | None:
        is_beyond = not math.isfinite(value) or value >= self.least or value <= self.most
        self._steps = self._steps + 1 if is_beyond else 0
        if self._steps < self.patience:
            return None
        bound = f"at most {self.most:.3g}" if value <= self.most else f"at least {self.least:.3g}"
        kind = bound if math.isfinite(value) else "no finite number"
        since = f" for {self._steps} steps" if self._steps > 1 else ""
        return f"is {value:.4g}, {kind}{since}"


@dataclass
class Drift(Rule):
    """A mean of the last ``WINDOW`` values that is beyond a multiple of the mean of the first ones.

    above, below  the multiples; floor: the least mean of the last values that ``above`` looks at
    """

    above: float = math.inf
    below: float = 0.0
    floor: float = 0.0
    _first: list[float] = field(default_factory=list, init=False)
    _last: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW), init=False)

    def finding(self, value: float) -> str | None:
        if not math.isfinite(value):
            return None
        if len(self._first) < WINDOW:
            self._first.append(value)
            return None
        self._last.append(value)
        if len(self._last) < WINDOW:
            return None
        baseline, now = sum(self._first) / WINDOW, sum(self._last) / WINDOW
        if not (now > max(self.above * baseline, self.floor) or now < self.below * baseline):
            return None
        return f"is {now:.4g} over the last {WINDOW} steps and was {baseline:.4g} over the first {WINDOW}"


def rules() -> list[Rule]:
    """Fresh rules for one run."""
    found: list[Rule] = [
        Drift(
            "actor/entropy",
            "the policy has all but stopped exploring: raise algorithm.entropy_coef or rollout.temperature, widen the "
            "clip upwards (algorithm.clip_high), or lower actor.optim.lr; if the reward is as high as it can be, stop",
            below=0.1,
        ),
        Limit(
            "reward/score/std",
            "all responses get the same reward, and nothing can be learnt from that: look at the samples in rollouts/, "
            "whether the reward finds the answer in them, and whether the prompts are far too easy or too hard",
            most=1e-6,
        ),
        Limit(
            "algorithm/groups_equal_frac",
            "within every group the rewards are equal, so no response is better than another: raise "
            "trainer.group_size, mix easier and harder prompts, or drop such groups with algorithm dapo",
            least=1.0,
        ),
        Limit(
            "actor/kl",
            "the policy is far from its reference, where a reward is easily fooled: raise algorithm.kl_coef or lower "
            "actor.optim.lr, and read the samples in rollouts/",
            least=1.0,
        ),
        Limit(
            "actor/reward_kl",
            "the policy is far from its reference, where a reward is easily fooled: raise algorithm.kl_coef or lower "
            "actor.optim.lr, and read the samples in rollouts/",
            least=1.0,
        ),
        Limit(
            "actor/rollout_log_prob_diff/mean",
            "sampler and trainer disagree about the same tokens, so the policy that learns isn't the one that sampled: "
            "set algorithm.correction, or model.amp_dtype=float32 to see whether rounding is the cause",
            least=0.1,
        ),
        Drift(
            "actor/rollout_log_prob_diff/mean",
            "sampler and trainer disagree more and more about the same tokens: set algorithm.correction, lower "
            "actor.optim.lr, or save and look whether the weights have grown",
            above=5.0,
            floor=0.02,
        ),
        Drift(
            "rollout/response_len/mean",
            "responses have become much longer or shorter: read the samples in rollouts/, since a reward that pays for "
            "length or for brevity is the usual cause",
            above=3.0,
            below=1 / 3,
        ),
        Limit(
            "rollout/truncated_frac",
            "half of the responses are cut off before they end, so their rewards are those of unfinished text: raise "
            "rollout.max_response_tokens, or see whether the model ends its answers at all",
            least=0.5,
        ),
    ]
    for role, section in {"actor": "actor", "critic": "critic", "reward_model": "actor"}.items():
        found += [
            Limit(
                f"{role}/skipped_updates/sum",
                "updates whose loss or gradient was no finite number were left out: if it goes on, lower the learning "
                f"rate ({section}.optim.lr) or {section}.optim.max_grad_norm",
                least=1.0,
                patience=1,
            ),
            Limit(
                f"{role}/grad_norm",
                "nothing is learnt from such a gradient: see whether rewards differ, and whether a learning rate far "
                "too high has broken the weights",
                most=0.0,
            ),
        ]
    return found


class HealthWatch:
    """Holds every step's metrics against the rules; says each thing once in ``REPEAT`` steps."""

    def __init__(self, of: Sequence[Rule] | None = None) -> None:
        self._rules = list(rules() if of is None else of)
        self._said: dict[int, int] = {}

    def look(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """What is wrong as of ``step``, a sentence each: metric, value, step, what to try."""
        found = []
        for number, rule in enumerate(self._rules):
            if rule.metric not in metrics:
                continue
            problem = rule.finding(float(metrics[rule.metric]))
            if problem is None or step - self._said.get(number, -REPEAT) < REPEAT:
                continue
            self._said[number] = step
            found.append(f"step {step}: {rule.metric} {problem}: {rule.advice}")
        return found
