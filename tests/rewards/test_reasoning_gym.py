import importlib.util

import pytest

from verl.common.errors import MissingExtra
from verl.rewards.reasoning_gym import reasoning_gym

HAS_GYM = importlib.util.find_spec("reasoning_gym") is not None


@pytest.mark.skipif(not HAS_GYM, reason="needs reasoning-gym")
def test_the_gym_scores_its_own_answers() -> None:
    from reasoning_gym.factory import create_dataset

    entry = create_dataset("basic_arithmetic", size=1, seed=1)[0]
    assert reasoning_gym(f"so <answer> {entry['answer']} </answer>.", entry) == 1
    assert reasoning_gym(entry["answer"], entry) == 1
    assert reasoning_gym("<answer>1</answer><answer>nothing</answer>", entry) < 1
    assert reasoning_gym("", entry) < 1
    with pytest.raises(ValueError, match="no task"):
        reasoning_gym("", entry, task="basic_arithmetics")


@pytest.mark.skipif(HAS_GYM, reason="reasoning-gym is installed")
def test_without_the_package() -> None:
    with pytest.raises(MissingExtra, match="gym"):
        reasoning_gym("5", {"metadata": {"source_dataset": "basic_arithmetic"}})


def test_an_entry_without_a_task_is_an_error() -> None:
    with pytest.raises(ValueError, match="source_dataset"):
        reasoning_gym("5", {"question": "?", "answer": "5"})
