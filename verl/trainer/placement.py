"""Where the roles of a run live: the executor, and the devices of each role.

Numbers and names come in; pools and layouts for the controller go out. What torchrun says of this process is read here.
"""

from __future__ import annotations

import itertools
import os
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from verl.common.section import Section
from verl.controller import Layout, serve
from verl.engines.mesh import ParallelConfig

Devices = int | list[int]
OWN = ("critic", "reference", "rollout", "reward")
"""Roles that may have devices of their own."""


class PlacementConfig(Section):
    """Which processes run which role. A role without devices of its own shares the actor's processes.

    Numbers of devices take the lowest that no list names, the actor's first: `devices: 4, critic: 2` is six devices.
    Roles with the same list share processes. On a CPU a device is only a process.
    """

    executor: Literal["auto", "inprocess", "processes", "torchrun", "ray"] = "auto"
    """inprocess: one process. processes: workers on this machine. torchrun: the processes that torchrun started. ray: a
    Ray cluster. auto: torchrun if it launched this process, else processes for more than one device, else inprocess."""
    devices: Devices | None = None
    """Devices of the actor and of every role that has none of its own: how many a node, or which. null: one, or all
    that torchrun started."""
    critic: Devices | None = None
    """The critic's own devices: how many, beside those of other roles, or which; null: the actor's."""
    reference: Devices | None = None
    """The reference's own devices: how many, beside those of other roles, or which; null: the actor's."""
    rollout: Devices | None = None
    """The rollout's own devices, as above; null: the actor's, whose weights it then takes where they are."""
    reward: Devices | None = None
    """Devices of the reward model (`reward.model`), as above, each with a whole one; null: the actor's."""
    nodes: int = Field(1, ge=1)
    """Machines, each with these devices; more than one needs ray."""
    call_timeout_s: float | None = Field(None, gt=0)
    """A call to a worker that takes longer ends the run; null: no limit."""

    @field_validator("devices", *OWN)
    @classmethod
    def _some_devices(cls, value: Devices | None) -> Devices | None:
        if isinstance(value, int) and value < 1:
            raise ValueError("a role is on one device or more")
        if isinstance(value, list) and (not value or min(value) < 0 or len(set(value)) < len(value)):
            raise ValueError("a list names each device once, numbered from 0")
        return value

    @model_validator(mode="after")
    def _executor_has_room(self) -> Self:
        if self.kind == "inprocess":
            asked = [key for key in ("devices", *OWN) if getattr(self, key) not in (None, 1)]
            asked += [key for key in OWN if getattr(self, key) == 1]
            if asked:
                raise ValueError(
                    f"placement.executor=inprocess is one worker, and placement.{asked[0]} asks for others: set it to "
                    "processes, torchrun or ray"
                )
        if self.nodes > 1 and self.kind != "ray":
            raise ValueError(f"placement.nodes={self.nodes} needs placement.executor=ray, got {self.kind!r}")
        if self.kind != "torchrun" and (ranks := launched_ranks()) > 1:
            raise ValueError(
                f"placement.executor={self.kind} would leave {ranks - 1} of the {ranks} processes of torchrun without "
                "work: set it to torchrun or auto, or start one process"
            )
        if self.kind == "torchrun":
            self._check_ranks()
        return self

    @property
    def kind(self) -> str:
        """The executor, auto resolved."""
        if self.executor != "auto":
            return self.executor
        if launched_ranks() > 1:
            return "torchrun"
        is_named = any(isinstance(value, list) for value in self._asked.values())
        return "processes" if is_named or len(self._asked) > 1 or self.num_devices > 1 else "inprocess"

    @property
    def num_devices(self) -> int:
        """The actor's devices on a node."""
        return len(self.devices_of("actor"))

    def devices_of(self, role: str) -> tuple[int, ...]:
        """Indexes of the role's devices on each node."""
        named = {index for value in self._asked.values() if isinstance(value, list) for index in value}
        free = (index for index in itertools.count() if index not in named)
        found = {
            key: tuple(value) if isinstance(value, list) else tuple(itertools.islice(free, value))
            for key, value in self._asked.items()
        }
        return found.get(role, found["devices"])

    def key_of(self, role: str) -> str:
        """The key that says where ``role`` is."""
        return f"placement.{role}" if role in self._asked else "placement.devices"

    @property
    def idle_ranks(self) -> list[int]:
        """Processes that torchrun started and that no role is on."""
        used = {rank for role in ("actor", *OWN) for rank in self.devices_of(role)}
        return [rank for rank in range(launched_ranks()) if rank not in used]

    @property
    def _asked(self) -> dict[str, Devices]:
        """Key -> devices, the actor's first; without `devices` all that torchrun started and nobody else asks for."""
        own: dict[str, Any] = {key: value for key in OWN if (value := getattr(self, key)) is not None}
        if self.devices is not None:
            return {"devices": self.devices, **own}
        others = {index for value in own.values() if isinstance(value, list) for index in value}
        taken = len(others) + sum(value for value in own.values() if isinstance(value, int))
        ranks = launched_ranks() if self.executor in ("auto", "torchrun") else 1
        return {"devices": max(1, ranks - taken), **own}

    def _check_ranks(self) -> None:
        """Raises ValueError for ranks that torchrun didn't start, and for roles that share some of its ranks and not
        others: a process is in one group."""
        groups = {self.key_of(role): set(self.devices_of(role)) for role in ("actor", *OWN)}
        ranks = launched_ranks()
        for key, devices in groups.items():
            if ranks and max(devices) >= ranks:
                raise ValueError(
                    f"{key}={sorted(devices)} names rank {max(devices)}, but torchrun started {ranks} processes, "
                    f"numbered from 0: change {key}, or raise --nproc_per_node"
                )
        for (key, one), (other_key, other) in itertools.combinations(groups.items(), 2):
            if one & other and one != other:
                raise ValueError(
                    f"{key}={sorted(one)} and {other_key}={sorted(other)} share rank {min(one & other)} and not all of "
                    "them: make them equal, or have no rank in common"
                )


def layout_of(parallel: ParallelConfig) -> Layout:
    """The ranks of one copy of a model, as the controller counts them: those that split tokens are like those that
    split matrices, they all work on the same rows."""
    return Layout(
        tp_size=parallel.tensor_parallel_size * parallel.sequence_parallel_size, pp_size=parallel.pipeline_parallel_size
    )


def launched_ranks() -> int:
    """Processes that torchrun started, of which this is one; 0 where it didn't."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def is_other_rank() -> bool:
    """Whether this process is one that torchrun started to serve rank 0."""
    return launched_ranks() > 1 and os.environ["RANK"] != "0"


def serve_rank_0() -> None:
    """In torchrun's processes but rank 0's: do rank 0's bidding until its run is closed, then leave by SystemExit(0).

    Elsewhere nothing happens.
    """
    if is_other_rank():
        serve("torchrun")
        raise SystemExit(0)
