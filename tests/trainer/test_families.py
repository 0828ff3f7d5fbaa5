from __future__ import annotations

import pytest

from verl.algorithms import ALGORITHMS
from verl.common.errors import UnknownName
from verl.trainer.base_sections import Run
from verl.trainer.families import RUNS, TRAINERS, run_class, trainer_class
from verl.trainer.run_loop import RunLoop


def test_both_tables_know_the_same_families() -> None:
    assert set(RUNS) == set(TRAINERS) == {ALGORITHMS.load(name).family for name in ALGORITHMS}


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_has_sections_and_a_trainer(name: str) -> None:
    run = run_class(name)
    assert issubclass(run, Run) and run.family == ALGORITHMS.load(name).family
    assert issubclass(TRAINERS.load(run.family), RunLoop)


def test_the_trainer_follows_from_the_config() -> None:
    config = run_class("dpo").parse({"model": {"path": "m"}, "data": {"train": "d"}, "algorithm": "dpo"})
    assert trainer_class(config) is TRAINERS.load("preference")


@pytest.mark.parametrize("family", RUNS)
def test_two_runs_that_name_no_folder_have_one_each(family: str) -> None:
    name = next(name for name in sorted(ALGORITHMS) if ALGORITHMS.load(name).family == family)
    reward = {"reward": {"name": "exact"}} if family == "on_policy" else {}
    keys = {"model": {"path": "m"}, "data": {"train": "d"}, "algorithm": name, **reward}
    first, second = (run_class(name).parse(keys).trainer.output_dir for _ in range(2))
    assert first != second


def test_an_unknown_algorithm_is_named() -> None:
    with pytest.raises(UnknownName, match="did you mean 'dpo'"):
        run_class("dp0")
