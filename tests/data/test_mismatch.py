from __future__ import annotations

import random

import pytest

from verl.common.errors import DataError
from verl.data.examples import Answer, Example, ExampleDataset
from verl.data.gathering import LoadReport
from verl.data.mismatch import partners, with_mismatches


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 32, 33])
@pytest.mark.parametrize("seed", range(5))
def test_no_prompt_meets_its_own_answer_and_every_answer_is_used_once(size: int, seed: int) -> None:
    found = partners(range(size), seed)
    assert all(row != partner for row, partner in enumerate(found))
    assert sorted(found) == list(range(size))


def test_prompts_that_are_there_twice_do_not_meet_their_own_answers_either() -> None:
    draw = random.Random(0)
    for trial in range(200):
        prompts = [draw.randrange(1 + trial % 5 + 1) for _ in range(draw.randrange(2, 12))]
        if len(set(prompts)) == 1:
            continue
        found = partners(prompts, trial)
        assert all(prompts[row] != prompts[partner] for row, partner in enumerate(found)), prompts
        most = max(prompts.count(prompt) for prompt in prompts)
        if 2 * most <= len(prompts):
            assert sorted(found) == list(range(len(prompts)))


def test_one_prompt_with_most_rows_shares_the_others() -> None:
    found = partners(["a", "a", "a", "a", "b"], 0)
    assert found[:4] == [4, 4, 4, 4] and found[4] in range(4)


def test_the_estimate_of_a_table_whose_own_answers_alone_have_a_ratio_is_0() -> None:
    """Reversing five rows would leave the middle one with its own answer: 0.2."""
    found = partners(range(5), 3)
    assert sum(float(row == partner) for row, partner in enumerate(found)) / 5 == 0.0


def test_draws_follow_from_the_seed() -> None:
    assert partners(range(20), 1) == partners(range(20), 1) != partners(range(20), 2)


@pytest.mark.parametrize("prompts", [["a"], ["a", "a", "a"]])
def test_one_prompt_alone_is_refused(prompts: list[str]) -> None:
    with pytest.raises(DataError, match=r"all .* rows have the same prompt"):
        partners(prompts, 0)


def test_an_example_gets_its_own_prompt_with_anothers_answer() -> None:
    made = [Example(i, (Answer((10 + i,), (20 + i, 2), (True, True)),), (True,), "rows") for i in range(3)]
    found = with_mismatches(ExampleDataset(made, LoadReport(3, 3, {}, ())), seed=0, max_tokens=3)
    for example in found:
        assert example.mismatched is not None
        assert example.mismatched.prompt_ids == example.prompt_ids
        assert example.mismatched.response_ids != example.answers[0].response_ids
    assert {example.mismatched.response_ids for example in found if example.mismatched} == {(20, 2), (21, 2), (22, 2)}


def test_a_long_prompt_with_a_long_answer_is_cut_to_the_limit_of_an_example() -> None:
    long_prompt = Answer((10, 11, 12), (20,), (True,))
    long_answer = Answer((13,), (21, 22, 2), (True, False, True))
    made = [Example(i, (answer,), (True,), "rows") for i, answer in enumerate((long_prompt, long_answer))]
    found = with_mismatches(ExampleDataset(made, LoadReport(2, 2, {}, ())), seed=0, max_tokens=4)
    assert [example.mismatched for example in found] == [
        Answer((10, 11, 12), (21,), (True,)),
        Answer((13,), (20,), (True,)),
    ]
