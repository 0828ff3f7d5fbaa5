"""Devices of this machine for a pool."""

from __future__ import annotations

import pytest

from verl.common.errors import ConfigError
from verl.controller.executors.devices import local_devices
from verl.controller.pool import ResourcePool


def test_cpus() -> None:
    assert local_devices(ResourcePool(3, kind="cpu"), "processes") == ["cpu"] * 3


def test_several_machines() -> None:
    with pytest.raises(ConfigError, match=r"nodes: the executor 'processes' .* on 2; the executor 'ray'"):
        local_devices(ResourcePool(3, nodes=2), "processes")
