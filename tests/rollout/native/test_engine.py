import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.rollout.engines import BLOCK, assert_same, build, greedy, ids_of, prompt, request, response_log_probs
from tests.tiny import FAMILIES, tiny_model
from verl.batch import FinishReason
from verl.common.errors import ConfigError, StaleWeights, VerlError
from verl.rollout.base import Request, Response
from verl.rollout.native import engine as engine_module

ABORT = FinishReason.ABORT
BORDERS = [k * BLOCK + d for k in (1, 2, 3) for d in (-1, 0, 1)]


def sampled(length: int, seed: int, tokens: int = 14) -> Request:
    return request(prompt(length), tokens, seed=seed, temperature=1.0)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "gemma2"])
def test_prompts_at_block_borders_sent_twice_and_by_the_group(family: str) -> None:
    plain, on, off = tiny_model(family), build(family), build(family, prefix_cache=False)
    for length in BORDERS:
        row = request(prompt(length), 2 * BLOCK + 1)
        first = on.generate([row])
        assert ids_of(first) == [greedy(plain, row.prompt_ids, 2 * BLOCK + 1)]
        again = on.generate([row])
        assert on.stats.cached_prompt_tokens == (length - 1) // BLOCK * BLOCK
        assert on.stats.prefill_tokens == length - on.stats.cached_prompt_tokens > 0
        assert_same(again, first)
        assert_same(off.generate([row]), first)
        assert off.stats.cached_prompt_tokens == 0
        group = [request(prompt(length), 9, seed=seed, temperature=1.0) for seed in range(4)]
        assert_same(on.generate(group), off.generate(group))
        on.check_integrity()
        off.check_integrity()


def test_samples_of_a_prompt_share_its_computation_from_the_first_step() -> None:
    engine = build()
    engine.generate([sampled(11, seed) for seed in range(5)])
    assert engine.stats.prefill_tokens == 11 and engine.stats.cached_prompt_tokens == 4 * 11


@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_rows_come_out_the_same(family: str) -> None:
    rows = [sampled(n, seed=n) for n in (3, 9, 5, 9, 2, 6)]
    roomy, tight = build(family), build(family, cache_tokens=32)
    assert_same(tight.generate(rows), roomy.generate(rows))
    assert tight.stats.preemptions > 0 == roomy.stats.preemptions
    tight.check_integrity()
    assert_same(tight.generate(rows), roomy.generate(rows))


@pytest.mark.parametrize(
    "config",
    [
        {"max_running_rows": 1},
        {"max_running_rows": 2},
        {"max_prefill_tokens": 1},
        {"max_prefill_tokens": 5},
        {"block_size": 1},
        {"block_size": 3},
        {"block_size": 64},
    ],
)
def test_how_work_is_cut_changes_nothing(config: dict[str, int]) -> None:
    rows = [sampled(n, seed=n) for n in (3, 9, 9, 1, 17)]
    engine = build("gpt2", **config)
    assert_same(engine.generate(rows), build("gpt2").generate(rows))
    engine.check_integrity()


@pytest.mark.parametrize("steps", [2, 5])
def test_asking_for_several_tokens_at_once_changes_nothing(steps: int) -> None:
    """As on CUDA, where the host looks only every few tokens: what is sampled behind a row's end is dropped."""
    rows = [request(prompt(n), 3 * n, seed=n, temperature=1.0) for n in (1, 3, 4, 7)] + [
        request(prompt(250), 6, seed=1)
    ]
    for cache_tokens in (None, 268):
        engine = build("gpt2", cache_tokens=cache_tokens)
        engine.generate(rows[:1])
        engine._awake([engine._row(i, row) for i, row in enumerate(rows)])[1]._steps.most = steps
        assert_same(engine.generate(rows), build("gpt2").generate(rows))
        engine.check_integrity()


def test_a_request_that_never_fits_the_cache_is_refused_before_any_work() -> None:
    engine = build(cache_tokens=16)
    with pytest.raises(ConfigError, match=r"needs 5 cache blocks .* has 4: raise cache_tokens \(16\)"):
        engine.generate([request(prompt(4), 4), request(prompt(10), 8)])
    assert engine.stats.prefill_tokens == 0
    assert (
        len(engine.generate([request(prompt(10), 7, ignore_eos=True)])[0].response_ids) == 7
    )  # the last needs no slot


def test_cache_grows_with_what_calls_need_and_is_kept() -> None:
    engine = build()
    engine.generate([request(prompt(4), 4)])
    small = engine._scheduler.blocks.num_blocks
    engine.generate([request(prompt(40), 4)] * 3)
    large = engine._scheduler.blocks.num_blocks
    engine.generate([request(prompt(4), 4)])
    assert small == 2 and large == engine._scheduler.blocks.num_blocks == 64  # 3 x 11 blocks, rounded up


def test_cache_that_memory_limits_is_kept_unless_much_more_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory is what a test can't set; a cache that is taken anew forgets its prefixes."""
    blocks = [40]
    monkeypatch.setattr("verl.rollout.native.engine.affordable_tokens", lambda *_, **__: blocks[0] * BLOCK)
    engine, rows = build(), [sampled(20, seed=seed) for seed in range(12)]
    good = engine.generate(rows)
    for free, expected in ((45, 40), (9, 40), (60, 60)):
        blocks[0] = free
        before = engine._scheduler
        assert_same(engine.generate(rows), good)
        assert engine._scheduler.blocks.num_blocks == expected and (engine._scheduler is before) == (expected == 40)


def test_a_cache_may_be_taken_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short row's table must not go on, behind its own blocks, with those that its slot had in the larger one."""
    engine = build()
    for free, rows in (
        (200, [sampled(20, seed=seed) for seed in range(30)]),
        (9, [sampled(20, seed=5), sampled(3, seed=6)] * 20),
    ):
        engine.sleep()
        engine._blocks = 0  # what memory there is decides
        monkeypatch.setattr("verl.rollout.native.engine.affordable_tokens", lambda *_, b=free, **__: b * BLOCK)
        assert_same(engine.generate(rows), build(cache_tokens=4096).generate(rows))
        assert engine._scheduler.blocks.num_blocks == free


def test_changed_weights_drop_what_was_cached() -> None:
    module, other = tiny_model("llama"), tiny_model("llama", seed=3)
    engine, row = build(module=module), request(prompt(12), 8)
    engine.generate([row, row])
    with torch.no_grad():
        for old, new in zip(module.parameters(), other.parameters(), strict=True):
            old.copy_(new)
    with pytest.raises(StaleWeights, match="weights_changed"):
        engine.generate([row])
    engine.weights_changed(7)
    (response,) = engine.generate([row])
    assert engine.stats.cached_prompt_tokens == 0
    assert response.policy_version == 7 and response.response_ids == greedy(other, row.prompt_ids, 8)


def test_weights_in_other_storage_are_not_mixed_with_what_was_cached() -> None:
    """No version counter tells of them."""
    module, other = tiny_model("llama"), tiny_model("llama", seed=3)
    engine, row = build(module=module), request(prompt(12), 8)
    engine.generate([row])
    for old, new in zip(module.parameters(), other.parameters(), strict=True):
        old.data = new.data.clone()
    assert ids_of(engine.generate([row])) == [greedy(other, row.prompt_ids, 8)]
    assert engine.stats.cached_prompt_tokens == 0


def test_graphs_of_weights_that_are_gone_are_not_used_though_making_others_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, row = build(), request(prompt(12), 8)
    engine.generate([row])
    first, kind = engine._runner, engine_module.Runner
    for parameter in engine._model.module.parameters():
        parameter.data = parameter.data.clone()

    def without_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(engine_module, "Runner", without_memory)
    with pytest.raises(torch.OutOfMemoryError):
        engine.generate([row])
    monkeypatch.setattr(engine_module, "Runner", kind)
    engine.generate([row])
    assert engine._runner is not first


def after(calls: int) -> Callable[[], bool]:
    """Says True from the given call on."""
    count = itertools.count(1)
    return lambda: next(count) > calls


def again(rows: list[Request], responses: list[Response]) -> list[Request]:
    """Requests that let paused responses go on."""
    return [replace(row, resume=r) for row, r in zip(rows, responses, strict=True) if r.finish_reason == ABORT]


@pytest.mark.parametrize("calls", [0, 1, 2, 5, 9, 13])
@pytest.mark.parametrize("cache_tokens", [None, 32])
def test_paused_and_resumed_is_as_if_never_paused(calls: int, cache_tokens: int | None) -> None:
    rows = [sampled(n, seed=n) for n in (3, 9, 9, 5)]
    rows[2] = replace(rows[2], seed=77)
    straight, engine = build("gpt2").generate(rows), build("gpt2", cache_tokens=cache_tokens)
    paused = engine.generate(rows, should_pause=after(calls))
    engine.check_integrity()
    assert any(r.finish_reason == ABORT for r in paused)
    assert sum(len(r.response_ids) for r in paused) <= 4 * calls
    resumed = iter(engine.generate(again(rows, paused)))
    assert_same([next(resumed) if r.finish_reason == ABORT else r for r in paused], straight)


def test_tokens_after_an_update_come_from_the_new_weights_and_say_so() -> None:
    module, other = tiny_model("llama"), tiny_model("llama", seed=3)
    engine, row = build(module=module), sampled(9, seed=1)
    (paused,) = engine.generate([row], should_pause=after(6))
    cut = len(paused.response_ids)
    assert 0 < cut < 14 and paused.policy_versions == [0] * cut
    engine.load_weights(other.state_dict().items(), version=4)
    (whole,) = engine.generate(again([row], [paused]))
    assert engine.stats.cached_prompt_tokens == 0  # keys of the old weights are gone
    assert whole.response_ids[:cut] == paused.response_ids and whole.log_probs[:cut] == paused.log_probs
    assert whole.policy_versions == [0] * cut + [4] * (len(whole.response_ids) - cut) and whole.policy_version == 0
    expected = response_log_probs(other, row.prompt_ids, whole.response_ids)
    assert whole.log_probs[cut:] == pytest.approx(expected[cut:], abs=1e-5)


def test_only_a_paused_response_goes_on() -> None:
    engine, row = build(), request(prompt(4), 5, ignore_eos=True)
    (done,) = engine.generate([row])
    with pytest.raises(ConfigError, match="ended by length with 5 of 5 tokens"):
        engine.generate([replace(row, resume=done)])


def test_the_modules_weights_are_shared_and_its_modes_come_back() -> None:
    module = tiny_model("llama")
    engine = build(module=module)
    module.train()
    module.model.layers[1].eval()
    modes = [part.training for part in module.modules()]
    engine.generate([request(prompt(4), 3)])
    assert [part.training for part in module.modules()] == modes
    loss = engine._model.module.lm_head.weight.sum()
    loss.backward()  # parameters are still ordinary ones, of the module itself
    assert module.lm_head.weight.grad is not None


@pytest.mark.parametrize("name", ["lm_head", "model.layers.0.self_attn.v_proj"])
def test_what_is_no_number_is_told_and_not_kept(name: str) -> None:
    """In the cache it would come through the mask of rows that are computed later: 0 times nan is nan."""
    module = tiny_model("llama")
    engine = build(module=module, cache_tokens=64)
    rows = [request(prompt(n), 8) for n in (3, 9)]
    good = engine.generate(rows)
    weight = module.get_submodule(name).weight
    saved = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    engine.weights_changed(1)
    with pytest.raises(VerlError, match="nan"):
        engine.generate(rows)
    engine.check_integrity()
    with torch.no_grad():
        weight.copy_(saved)
    engine.weights_changed(0)
    assert_same(engine.generate(rows), good)


@pytest.mark.parametrize("calls", [0, 1, 2, 5])
def test_an_interrupted_call_leaves_an_engine_that_works(calls: int) -> None:
    engine, rows = build(cache_tokens=64), [sampled(n, seed=n) for n in (3, 9, 9)]
    good, is_late = engine.generate(rows), after(calls)

    def interrupt() -> bool:
        if is_late():
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        engine.generate(rows, should_pause=interrupt)
    engine.check_integrity()
    assert_same(engine.generate(rows), good)


@pytest.mark.parametrize(
    "work",
    [
        lambda engine: engine.generate([sampled(3, seed=0)]),
        lambda engine: engine.weights_changed(3),
        lambda engine: engine.load_weights([], 3),
        lambda engine: engine.sleep(),
        lambda engine: engine.wake(),
    ],
)
def test_nothing_else_goes_on_during_a_call(work: Callable[[Any], object]) -> None:
    """Rows of one call would end in another, and keys of old weights would stay known under the new version."""
    engine, rows = build(), [sampled(n, seed=n) for n in (3, 9)]
    good = engine.generate(rows)
    with pytest.raises(VerlError, match="generate is under way"):
        engine.generate(rows, should_pause=lambda: bool(work(engine)))
    assert engine.policy_version == 0
    assert_same(engine.generate(rows), good)


def test_the_callers_modes_of_torch_change_nothing() -> None:
    rows = [sampled(n, seed=n) for n in (3, 9)]
    good = build().generate(rows)
    with torch.inference_mode():
        engine = build()
        engine.wake()
        assert_same(engine.generate(rows), good)
        engine.sleep()
        engine.wake()
    assert_same(engine.generate(rows), good)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(engine.generate(rows), good)


def test_effective_settings_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = build()
    with caplog.at_level(logging.INFO, logger="verl.rollout"):
        engine.generate([request(prompt(3), 2)] * 3)
        engine.generate([request(prompt(3), 2)])
        engine.generate([request(prompt(3), 2, temperature=0.8)])
    lines = [record.getMessage() for record in caplog.records]
    assert (
        len(lines) == 2 and "temperature=0.0" in lines[0] and "top_p=1.0" in lines[0] and "temperature=0.8" in lines[1]
    )


def test_sleep_gives_the_cache_back_and_wake_takes_as_much() -> None:
    engine = build(cache_tokens=40)
    assert engine._runner is None
    engine.wake()
    assert engine._scheduler.blocks.num_blocks == 10
    engine.sleep()
    assert engine._runner is None and engine._scheduler is None


def test_stop_strings_without_a_tokenizer_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        build(stop=["x"])


def test_stats_count_one_call() -> None:
    engine = build()
    engine.generate([request(prompt(6), 5, ignore_eos=True), request(prompt(3, first=30), 2, ignore_eos=True)])
    stats = engine.stats
    assert (stats.prefill_tokens, stats.decode_steps, stats.extra["response_tokens"]) == (9, 4, 7)
    assert stats.extra["response_tokens_per_s"] > 0
