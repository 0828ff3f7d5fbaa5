"""The difference is over every sampled token, between the engine's log-probs and the trainer's."""

from __future__ import annotations

import dataclasses

import pytest

from tests.bench.words import tiny
from verl.bench.log_probs import log_prob_difference
from verl.bench.workloads import fixed


def test_sampler_and_trainer_agree_up_to_rounding() -> None:
    subject, config = tiny()
    found = log_prob_difference(subject, fixed(subject, config.fixed, 1).calls[-1])
    assert found["tokens"] == 3 * 4
    assert found["mean"] <= found["p99.9"] <= found["max"] < 1e-5


def test_a_wrong_log_prob_is_seen() -> None:
    subject, config = tiny()
    call = fixed(subject, config.fixed, 1).calls[-1]
    first, *others = call.responses
    log_probs = [*first.log_probs[:2], first.log_probs[2] - 0.5, *first.log_probs[3:]]
    wrong = dataclasses.replace(call, responses=[dataclasses.replace(first, log_probs=log_probs), *others])
    found = log_prob_difference(subject, wrong)
    assert found["max"] == pytest.approx(0.5, abs=1e-5)
    assert found["mean"] == pytest.approx(0.5 / 12, abs=1e-5)


def test_the_percentile_leaves_out_one_token_in_a_thousand() -> None:
    subject, _ = tiny()
    call = subject.call(subject.requests(subject.prompts(20, 3, "x"), [60] * 20, "x"))
    first, *others = call.responses
    for wrong, is_seen in ((1, False), (2, True)):  # rank 1199 of 1200: the largest one is left out
        log_probs = [value + (0.5 if i < wrong else 0.0) for i, value in enumerate(first.log_probs)]
        changed = dataclasses.replace(call, responses=[dataclasses.replace(first, log_probs=log_probs), *others])
        found = log_prob_difference(subject, changed)
        assert (found["p99.9"] > 0.4, found["max"] > 0.4) == (is_seen, True)
