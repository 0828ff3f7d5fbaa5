"""Pools say which devices, and refuse those that can't be."""

from __future__ import annotations

from typing import Any

import pytest

from verl.common.errors import ConfigError
from verl.controller.pool import ResourcePool


def test_several_nodes() -> None:
    pool = ResourcePool([2, 5], nodes=2)
    assert pool.size == 4
    assert [(pool.node_of(rank), pool.local_rank(rank)) for rank in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_devices_by_what_the_machine_has() -> None:
    assert ResourcePool([0, 3]).device_names(4) == ["cuda:0", "cuda:3"]
    assert ResourcePool([0, 3]).device_names(3) == ["cpu", "cpu"]
    assert ResourcePool([0, 3], kind="cpu").device_names(4) == ["cpu", "cpu"]
    with pytest.raises(ConfigError, match=r"asks for cuda:3, but this machine has 2 .* kind='cpu'"):
        ResourcePool([0, 3], kind="cuda").device_names(2)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"devices": 0}, "devices: a pool has one device or more"),
        ({"devices": []}, r"got \[\]"),
        ({"devices": [-1]}, r"numbered from 0; got \[-1\]"),
        ({"devices": [1, 1]}, r"once in a pool, got \[1, 1\]"),
        ({"nodes": 0}, "nodes: .* got 0"),
        ({"kind": "tpu"}, "kind: 'cpu' or 'cuda', got 'tpu'"),
    ],
)
def test_what_cannot_be(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ResourcePool(**arguments)
