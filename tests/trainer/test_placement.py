from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import sections
from verl.common.errors import ConfigError
from verl.controller import Layout
from verl.engines.mesh import ParallelConfig
from verl.trainer.placement import PlacementConfig, is_other_rank, launched_ranks, layout_of, serve_rank_0
from verl.trainer.sections import OnPolicyRun

ROLES = ("actor", "critic", "reference", "rollout")


@pytest.fixture
def eight_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in rank 0 of what torchrun started."""
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "8", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)


def placed(**keys: Any) -> dict[str, tuple[int, ...]]:
    placement = PlacementConfig.parse(keys, "placement")
    return {role: placement.devices_of(role) for role in ROLES}


def test_roles_without_devices_of_their_own_are_with_the_actor() -> None:
    assert placed(devices=2) == dict.fromkeys(ROLES, (0, 1))
    assert placed() == dict.fromkeys(ROLES, (0,))


def test_numbers_take_the_lowest_devices_that_are_free() -> None:
    found = placed(devices=2, critic=1, rollout=2)
    assert found == {"actor": (0, 1), "reference": (0, 1), "critic": (2,), "rollout": (3, 4)}
    found = placed(devices=2, critic=[0, 3], rollout=1)
    assert found == {"actor": (1, 2), "reference": (1, 2), "critic": (0, 3), "rollout": (4,)}


def test_equal_lists_are_one_place() -> None:
    found = placed(devices=[0, 1], critic=[2], reference=[2])
    assert found["critic"] == found["reference"] == (2,)


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({}, "inprocess"),
        ({"devices": 1}, "inprocess"),
        ({"devices": 2}, "processes"),
        ({"devices": [3]}, "processes"),
        ({"rollout": 1}, "processes"),
        ({"executor": "ray"}, "ray"),
    ],
)
def test_which_executor_auto_is(keys: dict[str, Any], kind: str) -> None:
    assert PlacementConfig.parse(keys, "placement").kind == kind
    assert launched_ranks() == 0 and not is_other_rank()
    serve_rank_0()  # returns: nothing to serve


@pytest.mark.usefixtures("eight_ranks")
def test_under_torchrun_the_actor_has_what_nobody_else_asks_for() -> None:
    assert PlacementConfig().kind == "torchrun" and launched_ranks() == 8
    assert placed() == dict.fromkeys(ROLES, tuple(range(8)))
    found = placed(critic=2, rollout=[0, 1])
    assert found == {"actor": (2, 3, 4, 5), "reference": (2, 3, 4, 5), "critic": (6, 7), "rollout": (0, 1)}
    assert PlacementConfig.parse({"devices": 4, "critic": 2}, "placement").idle_ranks == [6, 7]


@pytest.mark.usefixtures("eight_ranks")
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"devices": [0, 1], "rollout": [1, 2]}, r"placement\.devices=\[0, 1\] and placement\.rollout=\[1, 2\] share"),
        ({"devices": 2, "critic": [8]}, r"placement\.critic=\[8\] names rank 8, but torchrun started 8 processes"),
        ({"devices": 9}, r"placement\.devices=.* names rank 8, but torchrun started 8 processes.*--nproc_per_node"),
        ({"executor": "processes"}, "would leave 7 of the 8 processes of torchrun without work"),
    ],
)
def test_ranks_that_cannot_be(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PlacementConfig.parse(keys, "placement")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"devices": 0}, r"placement\.devices: a role is on one device or more, got 0$"),
        ({"critic": []}, r"placement\.critic.* each device once.*got \[\]"),
        ({"rollout": [1, 1]}, r"placement\.rollout.* each device once.*got \[1, 1\]"),
        ({"devices": [-1]}, r"placement\.devices.*numbered from 0"),
        ({"executor": "inprocess", "devices": 2}, r"inprocess is one worker, and placement\.devices asks"),
        ({"executor": "inprocess", "devices": [1]}, r"inprocess is one worker, and placement\.devices asks"),
        ({"executor": "inprocess", "critic": 1}, r"inprocess is one worker, and placement\.critic asks"),
        ({"nodes": 2, "devices": 2}, r"placement\.nodes=2 needs placement\.executor=ray, got 'processes'"),
    ],
)
def test_placements_that_cannot_be(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PlacementConfig.parse(keys, "placement")


PPO = {"algorithm": {"name": "ppo", "kl_coef": 0.1}}
TP3, PP2 = {"tensor_parallel_size": 3}, {"pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"placement__devices": 4, "actor__parallel": {**TP3, **PP2}},
            r"actor\.parallel\.tensor_parallel_size=3 × actor\.parallel\.pipeline_parallel_size=2 takes 6 ranks a "
            r"model, which doesn't divide those of placement\.devices \(4 devices\)",
        ),
        (
            {**PPO, "placement": {"devices": 2, "critic": 1}, "critic__parallel": PP2},
            r"critic\.parallel\.pipeline_parallel_size=2 takes 2 .* placement\.critic \(1 device\)",
        ),
        ({"actor__parallel": PP2}, r"actor\.parallel\.pipeline_parallel_size=2 .* placement\.devices \(1 device\)"),
        ({"actor__offload_parameters": True}, r"actor\.offload_parameters=true needs several.*placement\.devices"),
        (
            {"placement__devices": 2, "trainer__device": "cuda:1"},
            r"trainer\.device=cuda:1 names one device.*placement\.executor=processes",
        ),
    ],
)
def test_runs_whose_devices_have_no_room(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OnPolicyRun.parse(sections(tmp_path, **changes))


def test_a_role_that_does_not_run_may_say_anything(tmp_path: Path) -> None:
    OnPolicyRun.parse(sections(tmp_path, placement__devices=2, critic__parallel=TP3))


def test_devices_of_a_role_that_does_not_run_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    OnPolicyRun.parse(sections(tmp_path, placement={"devices": 2, "critic": 1, "rollout": 1}))
    assert "key without effect: placement.critic: the run as configured has no critic" in caplog.text
    assert "placement.rollout" not in caplog.text


def test_ranks_that_split_tokens_count_as_those_that_split_matrices() -> None:
    sizes = ParallelConfig(tensor_parallel_size=2, sequence_parallel_size=3, pipeline_parallel_size=4)
    assert layout_of(sizes) == Layout(tp_size=6, pp_size=4)
