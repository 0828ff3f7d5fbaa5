"""Sizes of the workloads come from words, and wrong words are refused before a model is made."""

from __future__ import annotations

import pytest

from verl.bench.rollout_config import RolloutBench
from verl.common.errors import ConfigError


def test_words_change_one_workload_and_the_engine() -> None:
    config = RolloutBench.read(["fixed.rows=7", "rollout.block_size=4", "rollout.temperature=0.5"])
    assert (config.fixed.rows, config.spread.rows, config.group.rows) == (7, 32, 4)
    engine = config.engine_config()
    assert (engine.name, engine.temperature, engine.model_dump()["block_size"]) == ("native", 0.5, 4)
    assert config.model.scratch is not None and config.model.scratch["hidden_size"] == 128


@pytest.mark.parametrize(
    "words, said",
    [
        (["fixed.rows=0"], r"fixed.rows: .*got 0"),
        (["fixed.row=1"], r"unknown key 'row'; did you mean 'rows'"),
        (["group.group_size=1"], r"group.group_size: .*greater than or equal to 2, got 1"),
        (["spread.new_tokens=7"], r"spread.new_tokens: must be at least 8: .*got 7"),
        (["rollout.blok_size=4"], r"did you mean 'block_size'"),
        (["rollout.name=natif"], r"unknown rollout engine 'natif'; did you mean 'native'"),
        (["rollout.max_response_tokens=9"], r"rollout.max_response_tokens can't be set here: .*fixed.new_tokens"),
        (["rollout.stop=[a]", "rollout.ignore_eos=false"], r"rollout.stop, rollout.ignore_eos can't be set here"),
        (["trainer.prompts_per_step=4"], r"unknown key 'prompts_per_step'"),
        (["model.path=somewhere"], r"exactly one of model.path and model.scratch"),
    ],
)
def test_wrong_words_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RolloutBench.read(words)
