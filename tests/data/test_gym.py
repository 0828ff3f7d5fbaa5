import string
import sys

import pytest

from verl.common.errors import ConfigError, MissingExtra
from verl.data.config import DataConfig
from verl.data.prompts import load_prompts, shared_prompts
from verl.models.loading import character_tokenizer

TOKENIZER = character_tokenizer(string.printable)


def load(source, **keys):
    pytest.importorskip("reasoning_gym")
    return load_prompts(source, DataConfig(**keys), TOKENIZER)


def test_a_task_becomes_prompts_that_its_own_scorer_can_judge():
    data = load("gym:chain_sum?size=5&seed=1&num_terms=2")
    import reasoning_gym

    made = reasoning_gym.create_dataset("chain_sum", size=5, seed=1, min_terms=2, max_terms=2)
    assert [row.prompt for row in data] == [entry["question"] for entry in made]
    assert [row.ground_truth for row in data] == [entry["answer"] for entry in made]
    assert [row.source for row in data] == ["gym:chain_sum"] * 5
    for row in data:
        assert row.extra["task"] == "chain_sum"
        assert made.score_answer(row.ground_truth, row.extra["entry"]) == 1.0
        assert made.score_answer("nothing", row.extra["entry"]) < 1.0


def test_the_same_name_gives_the_same_questions():
    first, again = (load("gym:chain_sum?size=4") for _ in range(2))
    assert first.fingerprint == again.fingerprint
    assert shared_prompts(first, again) == [0, 1, 2, 3]


def test_close_seeds_share_entries():
    first, second = (load(f"gym:chain_sum?size=4&seed={seed}") for seed in (0, 1))
    assert [row.prompt for row in first][1:] == [row.prompt for row in second][:3]


def test_tasks_mix_with_files_under_other_column_names():
    rows = [{"question": "hi", "reward": {"truth": 3}}]
    data = load([rows, "gym:chain_sum?size=1"], prompt_key="question", ground_truth_key="reward.truth")
    assert data[0].ground_truth == 3 and data[0].extra["entry"] is None
    assert data[1].ground_truth == data[1].extra["entry"]["answer"]


def test_tasks_without_a_single_answer():
    (row,) = load("gym:graph_color?size=1&min_num_vertices=4&max_num_vertices=5")
    assert row.ground_truth == "" and row.extra["entry"]["answer"] is None


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("gym:chain_sun", r"no task 'chain_sun'; did you mean 'chain_sum'"),
        ("gym:chain_sum?sise=3", r"no option 'sise'; did you mean 'size'.*min_terms"),
        ("gym:chain_sum?size=0", r"refuses .*size must be positive"),
        ("gym:chain_sum?size=many", "refuses"),
        ("gym:", "no task ''"),
    ],
)
def test_wrong_names_and_options(source, said):
    with pytest.raises(ConfigError, match=said):
        load(source)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingExtra, match=r"'gym:chain_sum' needs .*verl\[gym\]"):
        load_prompts("gym:chain_sum", DataConfig(), TOKENIZER)
