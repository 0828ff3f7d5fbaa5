"""The 3D-HybridEngine's own keys: what they come to, and what they can't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trainer.runs import config_file, sections
from verl.common.errors import ConfigError
from verl.config import load_config
from verl.trainer.sections import OnPolicyRun
from verl.trainer.sharding_keys import without_sharding_keys

SNIPPET = """
actor:
  model_config:
    hybrid_engine:
      enable: true
      rollout_sharding:
        tensor_parallel_size: 4
      training_sharding:
        pipeline_parallel_size: 2
        data_parallel_size: 2
"""
"""As users know it: four ranks that sample, two stages of two that learn."""


def keys(*, rollout: int = 1, **training: Any) -> dict[str, Any]:
    layouts = {"rollout_sharding": {"tensor_parallel_size": rollout}, "training_sharding": training}
    return {"hybrid_engine": {"enable": True, **layouts}}


def test_the_snippet_says_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match=r"rollout_sharding\.tensor_parallel_size=4.*Set it to 1.*placement\.rollout"):
        without_sharding_keys(yaml.safe_load(SNIPPET))


def test_the_snippet_with_whole_rollouts(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    text = path.read_text(encoding="utf-8") + "placement: {executor: processes}\n"
    path.write_text(text.replace("actor:\n", SNIPPET[1:], 1), encoding="utf-8")
    run = load_config(path, ["actor.model_config.hybrid_engine.rollout_sharding.tensor_parallel_size=1"])
    assert run.actor.parallel.pipeline_parallel_size == 2 and run.placement.devices == 4
    assert run.actor.optim.lr == 0.01, "the section's other keys stay"
    assert run.model_dump()["actor"].keys() == OnPolicyRun.parse(sections(tmp_path)).model_dump()["actor"].keys()


def test_copies_count_every_rank_of_a_model() -> None:
    actor = {"parallel": {"tensor_parallel_size": "2"}, "model_config": keys(data_parallel_size=3)}
    assert without_sharding_keys({"actor": actor, "data": 1})["placement"] == {"devices": 6}
    nodes = {"actor": actor, "placement": {"executor": "ray", "nodes": "2"}}
    assert without_sharding_keys(nodes)["placement"]["devices"] == 3
    with pytest.raises(ConfigError, match=r"takes 6 devices, which don't divide over placement\.nodes=4"):
        without_sharding_keys({"actor": actor, "placement": {"executor": "ray", "nodes": 4}})


def test_keys_that_say_the_same_and_keys_that_do_not() -> None:
    same = {"actor": {"model_config": keys(data_parallel_size=2)}, "placement": {"devices": [4, 5]}}
    assert without_sharding_keys(same)["placement"] == {"devices": [4, 5]}
    with pytest.raises(ConfigError, match=r"data_parallel_size=2 takes 2 devices, but placement\.devices=3"):
        without_sharding_keys({**same, "placement": {"devices": "3"}})
    actor = {"model_config": keys(pipeline_parallel_size=2), "parallel": {"pipeline_parallel_size": 4}}
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=2, but actor\.parallel\.pipeline_parallel_size=4"):
        without_sharding_keys({"actor": actor})


def test_layouts_that_are_not_enabled() -> None:
    off = {"enable": False, "training_sharding": {"data_parallel_size": 2}}
    with pytest.raises(ConfigError, match=r"training_sharding is given, but .*enable isn't true"):
        without_sharding_keys({"actor": {"model_config": {"hybrid_engine": off}}})
    assert without_sharding_keys({"actor": {"model_config": {"hybrid_engine": {"enable": False}}}}) == {"actor": {}}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"hybrid_engin": {}}, r"actor\.model_config: unknown key 'hybrid_engin'; did you mean 'hybrid_engine'"),
        (keys(data_parallel_size=0), r"actor\.model_config\.hybrid_engine\.training_sharding\.data_parallel_size"),
        (keys(tensor_size=2), r"training_sharding: unknown key 'tensor_size'"),
        (4, r"actor\.model_config\.hybrid_engine: .*got 4"),
    ],
)
def test_wrong_keys_are_named(given: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        without_sharding_keys({"actor": {"model_config": given}})


def test_sections_without_them_stay_as_they_are() -> None:
    for plain in ({}, {"actor": None}, {"actor": {"optim": {"lr": 1}}, "placement": {"devices": 2}}):
        assert without_sharding_keys(plain) == plain
