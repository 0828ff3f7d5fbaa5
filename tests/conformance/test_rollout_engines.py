"""What every rollout engine must do, on every model family: equal the module's own full forward."""

from __future__ import annotations

import pytest
import torch

from tests.rollout.engines import assert_same, build, greedy, ids_of, prompt, request, response_log_probs
from tests.tiny import FAMILIES, VOCAB, tiny_model, word_tokenizer
from verl.batch import FinishReason
from verl.common.errors import ConfigError, DataError, VerlError
from verl.rollout import ROLLOUT_ENGINES

ENGINES = sorted(ROLLOUT_ENGINES)
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 13]  # around the borders of blocks of 4, longer than a window of 6


@pytest.fixture(params=ENGINES)
def engine_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_log_probs_are_those_of_a_full_forward(engine_name: str, family: str) -> None:
    plain, engine = tiny_model(family), build(family, engine_name)
    prompts = [prompt(n, first=5 + n) for n in LENGTHS]
    for start, response in zip(prompts, engine.generate([request(p, 10) for p in prompts]), strict=True):
        assert response.response_ids == greedy(plain, start, 10)
        torch.testing.assert_close(
            response.log_probs, response_log_probs(plain, start, response.response_ids), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_log_probs_are_tempered_ones_of_a_full_forward(engine_name: str, family: str) -> None:
    plain, engine = tiny_model(family), build(family, engine_name)
    prompts = [prompt(n) for n in (3, 8, 11)]
    responses = engine.generate([request(p, 12, seed=i, temperature=1.7) for i, p in enumerate(prompts)])
    for start, response in zip(prompts, responses, strict=True):
        expected = response_log_probs(plain, start, response.response_ids, 1.7)
        torch.testing.assert_close(response.log_probs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_does_not_depend_on_its_neighbours(engine_name: str, family: str) -> None:
    """Learned positions (gpt2) show what rotary ones hide."""
    engine = build(family, engine_name)
    rows = [request(prompt(n, first=n + 6), 9, seed=n, temperature=1.0) for n in (1, 4, 6, 14)]
    alone = [engine.generate([row])[0] for row in rows]
    assert_same(engine.generate(rows), alone)
    assert_same(engine.generate(rows[::-1])[::-1], alone)
    crowd = [request(prompt(30, first=9), 20, seed=77, temperature=1.0)] * 3
    assert_same(engine.generate([*crowd, *rows])[3:], alone)


def test_seeds_alone_decide_the_draws(engine_name: str) -> None:
    engine = build(engine=engine_name)
    rows = [request(prompt(6), 16, seed=seed, temperature=1.0, ignore_eos=True) for seed in (1, 2, 1, 2**62 + 1)]
    first, second, again, far = ids_of(engine.generate(rows))
    assert first == again
    assert len({tuple(first), tuple(second), tuple(far)}) == 3
    assert ids_of(build(engine=engine_name).generate(rows)) == [first, second, again, far]


def test_lengths_and_finish_reasons_are_recorded_not_guessed(engine_name: str) -> None:
    start = prompt(5)
    path = greedy(tiny_model("llama"), start, 8, eos=())
    stop_at = next(i for i, token in enumerate(path) if token not in path[:i] and i >= 2)
    engine = build(engine=engine_name, eos=[path[stop_at]])
    rows = [request(start, 8), request(start, stop_at), request(start, stop_at + 1), request(start, 1)]
    responses = engine.generate(rows)
    whole = path[: stop_at + 1]
    assert ids_of(responses) == [whole, whole[:-1], whole, whole[:1]]
    assert [len(r.log_probs) for r in responses] == [len(r.response_ids) for r in responses]
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    assert [r.finish_reason for r in responses] == [stop, length, stop, length]


def test_a_padding_id_that_is_sampled_is_a_token_like_any_other(engine_name: str) -> None:
    engine = build(engine=engine_name)
    (row,) = engine.generate([request(prompt(5), 250, seed=3, temperature=50.0, ignore_eos=True)])
    assert 0 in row.response_ids[:-1] and 2 in row.response_ids[:-1]
    assert len(row.response_ids) == len(row.log_probs) == 250 and row.finish_reason is FinishReason.LENGTH


def test_ends_at_any_of_several_ids_unless_told_not_to(engine_name: str) -> None:
    start = prompt(5)
    path = greedy(tiny_model("llama"), start, 8, eos=())
    eos, extra = path[4], path[2]
    engine = build(engine=engine_name, eos=[next(i for i in range(VOCAB) if i not in path), eos])
    rows = [
        request(start, 8),
        request(start, 8, stop_token_ids=(extra,)),
        request(start, 8, ignore_eos=True),
        request(start, 8, ignore_eos=True, stop_token_ids=(extra,)),
    ]
    ends = [path.index(eos) + 1, min(path.index(eos), path.index(extra)) + 1, 8, path.index(extra) + 1]
    responses = engine.generate(rows)
    assert ids_of(responses) == [path[:end] for end in ends]
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    assert [r.finish_reason for r in responses] == [stop, stop, length, stop]


def test_minimum_length_bans_stop_ids_until_it_is_reached(engine_name: str) -> None:
    start = prompt(5)
    path = greedy(tiny_model("llama"), start, 8, eos=())
    engine = build(engine=engine_name, eos=[path[1]])
    free, held = engine.generate([request(start, 8), request(start, 8, min_new_tokens=5)])
    assert len(free.response_ids) == 2
    assert len(held.response_ids) >= 5 and path[1] not in held.response_ids[:5]
    expected = response_log_probs(tiny_model("llama"), start, held.response_ids)
    torch.testing.assert_close(held.log_probs, expected, atol=1e-5, rtol=0)  # of the policy, not of the banned one


def test_stop_string_over_several_tokens_ends_the_response(engine_name: str) -> None:
    start, tokenizer = prompt(5), word_tokenizer()
    path = greedy(tiny_model("llama"), start, 8, eos=())
    words = tokenizer.convert_ids_to_tokens(path)
    engine = build(engine=engine_name, tokenizer=tokenizer, eos=[])
    straddling = words[2][-1] + " " + words[3][:2]
    early, late, never = engine.generate(
        [request(start, 8, stop=stop) for stop in ((straddling,), (words[6], "zz"), ("zz",))]
    )
    assert early.response_ids == path[:4] and early.finish_reason is FinishReason.STOP
    assert late.response_ids == path[: path.index(path[6]) + 1] and late.finish_reason is FinishReason.STOP
    assert never.response_ids == path and never.finish_reason is FinishReason.LENGTH


def test_new_weights_change_the_answer_and_the_version(engine_name: str) -> None:
    engine, other = build(engine=engine_name), tiny_model("llama", seed=5)
    row = request(prompt(9), 8)
    (before,) = engine.generate([row])
    engine.load_weights(other.state_dict().items(), version=3)
    (after,) = engine.generate([row])
    assert (before.policy_version, after.policy_version, engine.policy_version) == (0, 3, 3)
    assert after.response_ids == greedy(other, row.prompt_ids, 8) != before.response_ids


def test_sleeping_changes_nothing(engine_name: str) -> None:
    engine = build(engine=engine_name)
    rows = [request(prompt(n), 8, seed=n, temperature=1.0) for n in (3, 8)]
    before = engine.generate(rows)
    engine.sleep()
    assert_same(engine.generate(rows), before)
    engine.sleep()
    engine.sleep()
    engine.wake()
    engine.wake()
    assert_same(engine.generate(rows), before)


def test_requests_that_can_not_be_are_refused_before_any_work(engine_name: str) -> None:
    engine = build("gpt2", engine_name)
    good = request(prompt(3), 4)
    with pytest.raises(ConfigError, match=r"max_position_embeddings.*max_response_tokens"):
        engine.generate([good, request(prompt(250), 7)])
    with pytest.raises(DataError, match="request 1 has an empty prompt"):
        engine.generate([good, request([], 4)])
    with pytest.raises(DataError, match=f"prompt id {VOCAB} is outside"):
        engine.generate([request([5, VOCAB], 4)])
    with pytest.raises(ConfigError, match=r"stop_token_ids has 64"):
        engine.generate([request([5], 4, stop_token_ids=(VOCAB,))])
    with pytest.raises(VerlError, match="tokenizer"):
        engine.generate([request([5], 4, stop=("a",))])
    (full,) = engine.generate([request(prompt(249), 7, ignore_eos=True)])
    assert len(full.response_ids) == 7
    assert engine.generate([]) == []


def test_a_model_folders_sampling_settings_are_ignored(engine_name: str) -> None:
    """A generation config with a penalty, a temperature and truncation leaks into nothing."""
    module = tiny_model("llama")
    for name, value in {
        "repetition_penalty": 1.9,
        "temperature": 0.3,
        "top_k": 2,
        "top_p": 0.5,
        "do_sample": True,
    }.items():
        setattr(module.generation_config, name, value)
    rows = [request(prompt(5), 1, seed=seed, temperature=1.0) for seed in range(600)]
    with_settings, without = (
        build(engine=engine_name, module=module).generate(rows),
        build(engine=engine_name).generate(rows),
    )
    assert_same(with_settings, without, tolerance=0)
    likeliest = tiny_model("llama")(input_ids=torch.tensor([prompt(5)])).logits[0, -1].topk(2).indices.tolist()
    assert {r.response_ids[0] for r in with_settings} - set(likeliest)
