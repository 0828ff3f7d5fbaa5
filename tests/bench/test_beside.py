"""``generate`` runs the same weights unmodified, and its log-probs are those of the tokens that it sampled."""

from __future__ import annotations

import dataclasses

import pytest

from tests.bench.words import TINY, tiny
from verl.bench.beside import PEERS, Generate
from verl.bench.log_probs import log_prob_difference
from verl.bench.rollout_config import RolloutBench
from verl.bench.subject import Subject
from verl.bench.workloads import fixed, spread


def test_its_samples_have_the_subjects_own_log_probs() -> None:
    subject = Subject.build(RolloutBench.read([*TINY, "rollout.temperature=0.7"]))
    requests = subject.requests(subject.prompts(4, 6, "x"), [50] * 4, "x")
    ids, log_probs = Generate(subject).sample(requests, has_log_probs=True)
    assert [len(row) for row in ids] == [len(row) for row in log_probs] == [50] * 4
    ours = subject.call(requests)
    theirs = [
        dataclasses.replace(response, response_ids=i, log_probs=x)
        for response, i, x in zip(ours.responses, ids, log_probs, strict=True)
    ]
    assert log_prob_difference(subject, dataclasses.replace(ours, responses=theirs))["max"] < 1e-5


def test_without_log_probs_there_are_ids_alone() -> None:
    subject, _ = tiny()
    ids, log_probs = Generate(subject).sample(subject.requests([[3, 4]], [5], "x"), has_log_probs=False)
    assert ([len(row) for row in ids], log_probs) == ([5], [])


def test_only_tokens_that_were_asked_for_count() -> None:
    subject, config = tiny()
    calls = spread(subject, config.spread, repeats=1).calls
    found = Generate(subject).figures(calls)
    assert found["ratio"] == pytest.approx(calls[1].tokens_per_s / found["tokens_per_s"])
    assert found["first_ratio"] == pytest.approx(calls[0].tokens_per_s / found["first_tokens_per_s"])
    assert found["has_log_probs"] is True
    assert found["tokens_per_s_min"] <= found["tokens_per_s"] <= found["tokens_per_s_max"]


def test_scores_that_memory_cant_hold_are_not_asked_for() -> None:
    subject, _ = tiny()
    peer = Generate(subject)
    assert peer.can_keep_scores(subject.requests([[3]], [8], "x"))
    assert not peer.can_keep_scores(subject.requests([[3]], [2**50], "x"))


def test_the_subject_still_samples_after_it() -> None:
    subject, config = tiny()
    before = fixed(subject, config.fixed, 1).calls[-1]
    peer = PEERS["generate"](subject)
    peer.figures([before, before])
    assert fixed(subject, config.fixed, 1).calls[-1].responses == before.responses
