"""Each workload makes the calls that it says, and counts what they made."""

from __future__ import annotations

import pytest
import torch

from tests.bench.words import tiny
from verl.bench.workloads import WORKLOADS, fixed, group, sleep, spread, update


def test_fixed_makes_rows_of_one_length_to_new_prompts() -> None:
    subject, config = tiny()
    measured = fixed(subject, config.fixed, repeats=2)
    assert len(measured.calls) == 3
    prompts = [tuple(request.prompt_ids) for call in measured.calls for request in call.requests]
    assert len(set(prompts)) == 9, "no call finds its prompts in the cache"
    found = measured.figures
    assert (found["rows"], found["prompt_tokens"], found["new_tokens"], found["tokens"]) == (3, 5, 4, 12)
    assert (found["prefill_tokens"], found["cached_prompt_tokens"]) == (15, 0)
    assert found["decode_steps"] >= 3
    rates = [call.tokens_per_s for call in measured.calls]
    assert found["first_tokens_per_s"] == rates[0]
    assert [found["tokens_per_s_min"], found["tokens_per_s_max"]] == sorted(rates[1:])


def test_spread_makes_the_same_lengths_in_every_call() -> None:
    subject, config = tiny()
    measured = spread(subject, config.spread, repeats=1)
    lengths = [[len(response.response_ids) for response in call.responses] for call in measured.calls]
    assert lengths[0] == lengths[1]
    assert len(set(lengths[0])) > 1 and all(32 <= length <= 36 for length in lengths[0])
    assert measured.figures["tokens"] == sum(lengths[0])


def test_group_computes_a_prompt_once_and_compares_with_its_parts() -> None:
    subject, config = tiny()
    found = group(subject, config.group, repeats=1).figures
    assert found["tokens"] == 2 * 3 * 4
    assert found["prefill_tokens"] + found["cached_prompt_tokens"] == 2 * 3 * 40
    assert 2 * 40 <= found["prefill_tokens"] < 2 * 3 * 40
    parts = found["prompts_once_s"] + found["decode_all_s"]
    assert found["ratio"] == pytest.approx(found["seconds"] / parts)
    assert found["ratio_to_alone"] == pytest.approx(found["seconds"] / found["alone_s"])


def test_update_announces_real_changes_that_change_nothing() -> None:
    subject, config = tiny()
    parameters = dict(subject.lm.module.named_parameters())
    before = {name: (parameter.clone(), parameter._version) for name, parameter in parameters.items()}
    found = update(subject, config.update, repeats=2).figures
    assert subject.engine.policy_version == 3
    for name, (values, version) in before.items():
        assert torch.equal(parameters[name], values)
        assert parameters[name]._version == version + 3
    assert (found["rows"], found["new_tokens"]) == (2, 1)
    assert found["without_update_ms"] > 0
    assert found["update_ms"] == pytest.approx(found["with_update_ms"] - found["without_update_ms"])


def test_sleep_leaves_an_engine_that_works() -> None:
    subject, config = tiny()
    found = sleep(subject, config.sleep, repeats=1).figures
    assert {"sleep_s", "wake_s", "first_call_s", "warm_call_s"} <= found.keys()
    assert "given_back_bytes" not in found, "main memory isn't measured"
    assert min(found["sleep_s"], found["wake_s"], found["warm_call_s"]) > 0
    assert subject.call(subject.requests([[3]], [2], "x")).tokens == 2


def test_every_workload_by_its_name() -> None:
    subject, config = tiny()
    for name, run in WORKLOADS.items():
        work = getattr(config, name).model_dump()
        assert run(subject, config, 1).figures.items() >= work.items(), name
