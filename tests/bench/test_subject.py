"""A call is timed, counted and told by its phases; medians leave the first call out."""

from __future__ import annotations

import time

import pytest
import torch

from tests.bench.words import TINY, tiny
from verl.batch import FinishReason
from verl.bench.rollout_config import RolloutBench
from verl.bench.subject import Call, Subject, call_figures
from verl.rollout.base import RolloutStats


def test_prompts_are_of_a_call_and_of_the_seed() -> None:
    subject, _ = tiny()
    prompts = subject.prompts(3, 40, "fixed", 0)
    assert [len(ids) for ids in prompts] == [40] * 3
    assert {i for ids in prompts for i in ids} <= set(range(100))
    assert prompts == subject.prompts(3, 40, "fixed", 0)
    assert prompts != subject.prompts(3, 40, "fixed", 1)
    other = Subject.build(RolloutBench.read([*TINY, "trainer.seed=1"]))
    assert prompts != other.prompts(3, 40, "fixed", 0)
    parameter = "model.embed_tokens.weight"
    assert not torch.equal(subject.lm.module.state_dict()[parameter], other.lm.module.state_dict()[parameter])


def test_a_call_makes_as_many_tokens_as_asked_for_whatever_they_are() -> None:
    subject, _ = tiny()
    requests = subject.requests(subject.prompts(4, 6, "x"), [1, 9, 30, 80], "x")
    call = subject.call(requests)
    assert [len(r.response_ids) for r in call.responses] == [1, 9, 30, 80]
    assert {r.finish_reason for r in call.responses} == {FinishReason.LENGTH}, "an end-of-sequence id ends nothing"
    assert call.tokens == 120
    assert call.tokens_per_s == pytest.approx(120 / call.seconds)
    assert call.peak_beyond_bytes is None, "not known on the CPU"


def test_seconds_are_those_of_the_work() -> None:
    subject, _ = tiny()
    seconds, result = subject.timed(lambda: time.sleep(0.05) or "done")  # type: ignore[func-returns-value]
    assert 0.05 <= seconds < 1 and result == "done"


def call_of(tokens: int, seconds: float, peak: int | None = None, **extra: float) -> Call:
    subject, _ = tiny()
    responses = subject.call(subject.requests([[5]], [tokens], "x")).responses
    stats = RolloutStats(prefill_tokens=11, cached_prompt_tokens=3, decode_steps=4, preemptions=1, extra=extra)
    return Call([], responses, seconds, stats, peak)


def test_phases_are_those_that_the_engine_tells() -> None:
    assert call_of(2, 1.0, generate_s=1.0).phases() == {}
    told = call_of(2, 1.0, peak=7, prefill_s=0.25, decode_s=0.5, host_frac=0.125, generate_s=1.0).phases()
    assert told == {
        "prefill_s": 0.25,
        "decode_s": 0.5,
        "host_frac": 0.125,
        "decode_step_ms": 125.0,
        "peak_beyond_weights_and_cache_bytes": 7.0,
    }


def test_figures_are_medians_of_the_warm_calls() -> None:
    calls = [call_of(2, 10.0, decode_s=9.0), call_of(2, 1.0, decode_s=0.4), call_of(2, 4.0, decode_s=2.0)]
    assert call_figures([*calls, call_of(2, 2.0, decode_s=0.8)]) == {
        "tokens": 2,
        "tokens_per_s": 1.0,
        "tokens_per_s_min": 0.5,
        "tokens_per_s_max": 2.0,
        "first_tokens_per_s": 0.2,
        "seconds": 2.0,
        "first_s": 10.0,
        "decode_s": 0.8,
        "decode_step_ms": 200.0,
        "prefill_tokens": 11,
        "cached_prompt_tokens": 3,
        "decode_steps": 4,
        "preemptions": 1,
    }
