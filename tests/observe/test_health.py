"""Synthetic curves: what is said of them, when, and how often."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import pytest

from verl.observe.health import PATIENCE, REPEAT, WINDOW, HealthWatch, rules


def said(curve: Iterable[Mapping[str, float]]) -> list[str]:
    watch = HealthWatch()
    return [line for step, metrics in enumerate(curve, start=1) for line in watch.look(step, metrics)]


def curve(key: str, value_at: Callable[[int], float], steps: int = 40) -> list[dict[str, float]]:
    return [{key: value_at(step)} for step in range(1, steps + 1)]


HEALTHY: dict[str, Callable[[int], float]] = {
    "actor/entropy": lambda step: 2.0 * 0.98**step,
    "reward/score/std": lambda step: 0.4,
    "algorithm/groups_equal_frac": lambda step: 0.7,
    "actor/kl": lambda step: 0.01 * step,
    "actor/rollout_log_prob_diff/mean": lambda step: 0.01 + 0.0001 * step,
    "rollout/response_len/mean": lambda step: 100.0 + 2 * step,
    "rollout/truncated_frac": lambda step: 0.2,
    "actor/skipped_updates/sum": lambda step: 0.0,
    "actor/grad_norm": lambda step: 0.5,
}


def test_nothing_is_said_of_a_healthy_run() -> None:
    assert said([{key: value_at(step) for key, value_at in HEALTHY.items()} for step in range(1, 80)]) == []


@pytest.mark.parametrize(
    "key, value_at, first_step, words",
    [
        # from step 16 on 0.1: the last ten are 10 values of step 16 to 25; before, their mean is over a tenth of 2.0
        ("actor/entropy", lambda step: 2.0 if step <= 15 else 0.1, 25, "stopped exploring"),
        ("reward/score/std", lambda step: 0.3 if step < 5 else 0.0, 7, "same reward"),
        ("algorithm/groups_equal_frac", lambda step: 0.9 if step < 5 else 1.0, 7, "within every group"),
        ("actor/kl", lambda step: 0.2 * step, 7, "far from its reference"),
        ("actor/reward_kl", lambda step: 0.2 * step, 7, "far from its reference"),
        ("actor/rollout_log_prob_diff/mean", lambda step: 0.2, 3, "sampler and trainer disagree"),
        ("rollout/truncated_frac", lambda step: 0.4 if step < 10 else 0.6, 12, "cut off"),
        ("actor/skipped_updates/sum", lambda step: float(step == 6), 6, "left out"),
        ("critic/skipped_updates/sum", lambda step: 2.0 * (step == 6), 6, "critic.optim.lr"),
        ("actor/grad_norm", lambda step: 1.0 if step < 5 else 0.0, 7, "nothing is learnt"),
    ],
)
def test_a_sick_metric_is_named_with_its_value_and_the_first_step(
    key: str, value_at: Callable[[int], float], first_step: int, words: str
) -> None:
    first = said(curve(key, value_at))[0]
    assert first.startswith(f"step {first_step}: {key} is ") and words in first
    assert f"{value_at(first_step):.4g}" in first


@pytest.mark.parametrize("factor, is_drift", [(2.5, False), (3.5, True), (0.4, False), (0.3, True)])
def test_lengths_that_drift(factor: float, is_drift: bool) -> None:
    found = said(curve("rollout/response_len/mean", lambda step: 100.0 if step <= WINDOW else 100.0 * factor))
    assert bool(found) is is_drift
    if is_drift:
        assert found[0].startswith(f"step {2 * WINDOW}: rollout/response_len/mean is {100 * factor:.4g} over the last")
        assert "was 100 over the first 10" in found[0]


def test_a_growing_mismatch_is_seen_below_the_limit() -> None:
    found = said(curve("actor/rollout_log_prob_diff/mean", lambda step: 0.004 if step <= 20 else 0.05))
    assert len(found) == 1 and "more and more" in found[0]
    assert said(curve("actor/rollout_log_prob_diff/mean", lambda step: 1e-7 if step <= 20 else 1e-5)) == []


def test_a_single_bad_step_is_no_news() -> None:
    for key in ("reward/score/std", "actor/grad_norm"):
        assert said(curve(key, lambda step: 0.0 if step % PATIENCE == 0 else 1.0)) == []


def test_numbers_that_are_not_finite_are_beyond_every_limit() -> None:
    found = said(curve("actor/kl", lambda step: math.nan if step > 3 else 0.0))
    assert found[0].startswith("step 6: actor/kl is nan, no finite number for 3 steps")
    assert said(curve("actor/entropy", lambda step: math.nan)) == []
    (line,) = said(curve("actor/grad_norm", lambda step: math.nan))
    assert "is nan" in line and "is 0" not in line


def test_each_thing_is_said_once_in_a_while() -> None:
    found = said(curve("rollout/truncated_frac", lambda step: 1.0, steps=2 * REPEAT + PATIENCE))
    assert [line.split(":")[0] for line in found] == ["step 3", f"step {3 + REPEAT}", f"step {3 + 2 * REPEAT}"]


def test_metrics_that_a_run_has_not_are_not_missed() -> None:
    assert said([{"sft/loss": 1.0}] * 100) == []
    (line,) = said([{"reward/score/std": 0.0}, {"sft/loss": 1.0}] * 3)
    assert line.startswith("step 5: reward/score/std is 0, at most 1e-06 for 3 steps")


def test_every_rule_names_its_metric_and_what_to_try() -> None:
    assert all(rule.metric.count("/") >= 1 and len(rule.advice) > 40 for rule in rules())
