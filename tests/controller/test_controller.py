"""What belongs to the controller itself; what it does with workers is in tests/conformance/test_executors.py."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest

from tests.controller.roles import Echo, Tensors
from verl.common.errors import ConfigError, UnknownName
from verl.controller import Controller, ResourcePool, run


def test_unknown_executor() -> None:
    with pytest.raises(UnknownName, match="unknown executor 'proceses'; did you mean 'processes'"):
        Controller("proceses")


@pytest.mark.parametrize(
    "executor, pool, text",
    [
        ("inprocess", ResourcePool(2), "one worker, got a pool of 2"),
        ("processes", ResourcePool(1, nodes=2), "is for one machine, got a pool on 2"),
        ("processes", ResourcePool([99], kind="cuda"), "asks for cuda:99"),
    ],
)
def test_pools_that_an_executor_cannot_have(executor: str, pool: ResourcePool, text: str) -> None:
    with Controller(executor) as controller, pytest.raises(ConfigError, match=text):
        controller.group("echo", Echo, pool)


def test_torchrun_outside_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=r"RANK.* isn't set; start the program with torchrun"):
        run(lambda controller: None, "torchrun")


def test_arguments_are_taken_as_they_are_at_the_call() -> None:
    rows = [1, 2]
    with Controller("processes") as controller:
        echo = controller.group("echo", Echo, ResourcePool(1, kind="cpu"))
        echo.sleep(0.2)
        handle = echo.add(rows)
        rows.append(3)
        assert handle.get(30) == [1, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_memory_is_given_back_with_the_last_handle() -> None:
    with Controller("processes") as controller:
        group = controller.group("tensors", Tensors, ResourcePool(1, kind="cpu"))
        import torch

        group.noise(torch.zeros(8), 10_000).wait(60)
        before = memory_descriptors()
        handle = group.noise(torch.zeros(8), 10_000).wait(30)
        assert memory_descriptors() == before + 1
        group.shapes(handle).wait(30)
        del handle
        gc.collect()
        assert memory_descriptors() == before


def memory_descriptors() -> int:
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum("memfd:verl" in os.readlink(path) for path in links)
