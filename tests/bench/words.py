"""Overrides that make the rollout benchmark a matter of a second, and the subject that they describe."""

from __future__ import annotations

from verl.bench.rollout_config import RolloutBench
from verl.bench.subject import Subject

TINY = [
    "model.scratch.hidden_size=16",
    "model.scratch.intermediate_size=24",
    "model.scratch.num_hidden_layers=1",
    "model.scratch.vocab_size=100",
    "model.scratch.initializer_range=0.5",
    "trainer.device=cpu",
    *("fixed.rows=3", "fixed.prompt_tokens=5", "fixed.new_tokens=4"),
    *("spread.rows=4", "spread.prompt_tokens=5", "spread.new_tokens=9"),
    *("group.rows=2", "group.group_size=3", "group.prompt_tokens=40", "group.new_tokens=4"),
    *("update.rows=2", "sleep.rows=2", "sleep.new_tokens=3"),
]


def tiny() -> tuple[Subject, RolloutBench]:
    """A built subject and the keys that it came of."""
    config = RolloutBench.read(TINY)
    return Subject.build(config), config
