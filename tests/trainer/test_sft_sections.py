from __future__ import annotations

from typing import Any

import pytest

from verl.common.errors import ConfigError
from verl.trainer.sft_sections import SFTRun


def run(**sections: Any) -> SFTRun:
    return SFTRun.parse({"model": {"path": "m"}, "data": {"train": "d"}, "algorithm": "sft", **sections})


def test_an_example_fits_a_micro_batch() -> None:
    keys = {"data": {"train": "d", "max_example_tokens": 64}}
    assert run(**keys, actor={"max_tokens_per_micro_batch": 64}).longest_example[0] == 64
    with pytest.raises(ConfigError, match=r"data\.max_example_tokens = 64 .* actor\.max_tokens_per_micro_batch=63"):
        run(**keys, actor={"max_tokens_per_micro_batch": 63})


def test_keys_of_other_runs_are_refused_or_named() -> None:
    for section in ("reward", "rollout", "critic"):
        with pytest.raises(ConfigError, match=f"unknown key '{section}'"):
            run(**{section: {}})
    data = {"train": "d", "max_prompt_tokens": 3, "overlong_prompts": "left", "ground_truth_key": "x"}
    lines = "\n".join(run(data=data, reference={"max_tokens_per_micro_batch": 5}).ineffective_keys())
    for key in ("data.max_prompt_tokens", "data.overlong_prompts", "data.ground_truth_key", "reference"):
        assert f"key without effect: {key}" in lines
    assert run().ineffective_keys() == []
