"""Resource pools: which devices of which machines worker groups run on. Plain numbers; starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from verl.common.errors import ConfigError


class ResourcePool:
    """Devices with one worker process each. Groups on the same pool share its processes.

    devices  how many on each node, or their indexes there
    nodes    machines; more than one needs an executor that spans machines
    kind     "cuda" or "cpu"; left out, "cuda" where there are enough such devices, else "cpu"

    On CPUs an index is only a number: any pool fits any machine. Raises ConfigError for devices that can't be.
    """

    def __init__(
        self, devices: int | Sequence[int] = 1, *, nodes: int = 1, kind: Literal["cpu", "cuda"] | None = None
    ) -> None:
        if isinstance(devices, int):
            devices = range(devices)
        self.devices = tuple(devices)
        self.nodes = nodes
        self.kind = kind
        if not self.devices or min(self.devices) < 0:
            raise ConfigError(f"devices: a pool has one device or more, numbered from 0; got {list(self.devices)}")
        if len(set(self.devices)) != len(self.devices):
            raise ConfigError(f"devices: each may be named once in a pool, got {list(self.devices)}")
        if nodes < 1:
            raise ConfigError(f"nodes: a pool is on one machine or more, got {nodes}")
        if kind not in (None, "cpu", "cuda"):
            raise ConfigError(f"kind: 'cpu' or 'cuda', got {kind!r}")

    def __repr__(self) -> str:
        return f"ResourcePool(devices={list(self.devices)}, nodes={self.nodes})"

    @property
    def size(self) -> int:
        """Workers: devices of all nodes."""
        return len(self.devices) * self.nodes

    def node_of(self, rank: int) -> int:
        """The node of worker ``rank``."""
        return rank // len(self.devices)

    def local_rank(self, rank: int) -> int:
        """The number of worker ``rank`` on its node."""
        return rank % len(self.devices)

    def device_names(self, num_cuda_devices: int) -> list[str]:
        """ "cpu" or "cuda:<index>" for each device of a node that has ``num_cuda_devices`` of them.

        Raises ConfigError when ``kind`` is "cuda" and the node has too few.
        """
        fits = max(self.devices) < num_cuda_devices
        if self.kind == "cuda" and not fits:
            raise ConfigError(
                f"devices: {list(self.devices)} asks for cuda:{max(self.devices)}, but this machine has "
                f"{num_cuda_devices} CUDA devices; name others, or set kind='cpu'"
            )
        use_cuda = fits and self.kind != "cpu"
        return [f"cuda:{index}" if use_cuda else "cpu" for index in self.devices]
