from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from verl.common.errors import ConfigError
from verl.trainer.offline_sections import OfflineTrainerConfig, PreferenceRun


def run(algorithm: Any = "dpo", **sections: Any) -> PreferenceRun:
    return PreferenceRun.parse({"model": {"path": "m"}, "data": {"train": "d"}, "algorithm": algorithm, **sections})


@pytest.mark.parametrize(
    ("algorithm", "budget", "is_right"), [("dpo", 95, False), ("dpo", 96, True), ("kto", 47, False), ("kto", 48, True)]
)
def test_what_is_compared_fits_a_micro_batch(algorithm: str, budget: int, is_right: bool) -> None:
    keys = {"data": {"train": "d", "max_example_tokens": 48}}
    actor = {"actor": {"max_tokens_per_micro_batch": budget}}
    if is_right:
        assert run(algorithm, **keys, **actor).actor.max_tokens_per_micro_batch == budget
        return
    with pytest.raises(ConfigError, match=f"data.max_example_tokens = .* actor.max_tokens_per_micro_batch={budget}"):
        run(algorithm, **keys, **actor)


def test_more_mini_batches_than_examples_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"actor.mini_batches_per_epoch=5 .* trainer.rows_per_step=4"):
        run(actor={"mini_batches_per_epoch": 5}, trainer={"rows_per_step": 4})


@pytest.mark.parametrize(
    ("algorithm", "sections", "named"),
    [
        ("dpo", {"data": {"train": "d", "label_key": "ok"}}, ["data.label_key"]),
        ("dpo", {"data": {"train": "d", "judged_keys": ["a", "b"], "label_key": "ok"}}, []),
        ("dpo", {"data": {"train": "d", "judged_keys": ["a", "b"], "chosen_key": "x"}}, ["data.chosen_key"]),
        ("kto", {"data": {"train": "d", "rejected_key": "x"}}, ["data.rejected_key"]),
        ("kto", {"data": {"train": "d", "response_key": "x"}}, []),
        ("dpo", {"reference": {"max_tokens_per_micro_batch": 5}}, ["reference"]),
        ("dpo", {"data": {"train": "d", "ground_truth_key": "x"}}, ["data.ground_truth_key"]),
        ({"name": "dpo", "loss": "ipo", "label_smoothing": 0.1}, {}, ["algorithm.label_smoothing"]),
    ],
)
def test_keys_without_effect_are_named(algorithm: Any, sections: dict[str, Any], named: list[str]) -> None:
    lines = run(algorithm, **sections).ineffective_keys()
    assert [line.partition(": ")[2].partition(":")[0].partition(" ")[0] for line in lines] == named


@pytest.mark.parametrize("section", ["reward", "rollout", "critic"])
def test_sections_of_other_runs_are_unknown(section: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key {section!r}"):
        run(**{section: {}})


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_the_saved_config_reads_back_and_says_nothing_new(algorithm: str) -> None:
    config = run(algorithm)
    again: Any = OmegaConf.to_container(OmegaConf.create(config.as_yaml()))
    assert PreferenceRun.parse(again) == config
    assert PreferenceRun.parse(again).ineffective_keys() == []


def test_a_step_holds_a_row() -> None:
    with pytest.raises(ConfigError, match="rows_per_step"):
        OfflineTrainerConfig.parse({"rows_per_step": 0})
    assert OfflineTrainerConfig(rows_per_step=3).rows_per_batch == 3
