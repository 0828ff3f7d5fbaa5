"""Where the roles of a run live: the executor, and the devices of each role.

Numbers and names come in; pools and layouts for the controller go out. What torchrun says of this process is read here.
"""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from verl.common.section import Section
from verl.controller import Layout, ResourcePool, serve
from verl.engines.mesh import ParallelConfig

Devices = int | list[int]


class PlacementConfig(Section):
    """Which processes run which role. A role without devices of its own shares the actor's processes."""

    executor: Literal["auto", "inprocess", "processes", "torchrun", "ray"] = "auto"
    """inprocess: one process. processes: workers on this machine. torchrun: the processes that torchrun started. ray: a
    Ray cluster. auto: torchrun if it launched this process, else processes for more than one device, else inprocess."""
    devices: Devices | None = None
    """Devices of the actor and of every role that has none of its own: how many a node, or which. null: one, or all
    that torchrun started."""
    critic: Devices | None = None
    """The critic's own devices; null: the actor's."""
    reference: Devices | None = None
    """The reference's own devices; null: the actor's."""
    rollout: Devices | None = None
    """The rollout's own devices; null: the actor's, whose weights it then takes where they are."""
    nodes: int = Field(1, ge=1)
    """Machines, each with these devices; more than one needs ray."""
    call_timeout_s: float | None = Field(None, gt=0)
    """A call to a worker that takes longer ends the run; null: no limit."""

    @model_validator(mode="after")
    def _executor_has_room(self) -> Self:
        if self.kind == "inprocess":
            asked = [key for key in ("critic", "reference", "rollout") if getattr(self, key) is not None]
            if self.num_devices > 1 or asked:
                key = asked[0] if asked else "devices"
                raise ValueError(
                    f"placement.executor=inprocess is one worker, and placement.{key} asks for others: set it to "
                    "processes, torchrun or ray"
                )
        if self.nodes > 1 and self.kind != "ray":
            raise ValueError(f"placement.nodes={self.nodes} needs placement.executor=ray, got {self.kind!r}")
        if self.kind != "torchrun" and (ranks := launched_ranks()) > 1:
            raise ValueError(
                f"placement.executor={self.kind} would leave {ranks - 1} of the {ranks} processes of torchrun without "
                "work: set it to torchrun or auto, or start one process"
            )
        return self

    @property
    def kind(self) -> str:
        """The executor, auto resolved."""
        if self.executor != "auto":
            return self.executor
        if launched_ranks() > 1:
            return "torchrun"
        own = [self.critic, self.reference, self.rollout]
        return "processes" if self.num_devices > 1 or any(x is not None for x in own) else "inprocess"

    @property
    def num_devices(self) -> int:
        """The actor's devices on a node."""
        if self.devices is None:
            return (launched_ranks() or 1) if self.executor in ("auto", "torchrun") else 1
        return self.devices if isinstance(self.devices, int) else len(self.devices)

    def pool(self, devices: Devices | None, device_kind: Literal["cpu", "cuda"] | None) -> ResourcePool:
        """A pool of these devices; None: the actor's."""
        return ResourcePool(devices or self.devices or self.num_devices, nodes=self.nodes, kind=device_kind)

    @property
    def idle_ranks(self) -> list[int]:
        """Processes that torchrun started and that no role is on."""
        asked = [self.devices or self.num_devices, self.critic or 0, self.reference or 0, self.rollout or 0]
        used = {rank for devices in asked for rank in (range(devices) if isinstance(devices, int) else devices)}
        return [rank for rank in range(launched_ranks()) if rank not in used]


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
