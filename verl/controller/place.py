"""Where a worker stands: its rank among all and along each axis. Sizes in, coordinates out; no process, no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.common.errors import ConfigError


@dataclass(frozen=True)
class Rendezvous:
    """Address of the store at which the workers of one pool meet; ``prefix`` keeps pools on one store apart."""

    host: str
    port: int
    prefix: str


@dataclass(frozen=True)
class Place:
    """What a worker knows about where it stands; handed to its constructor as ``place``.

    rank, world_size        among all workers of the pool
    dp_*, tp_*, pp_*        along the data-parallel, tensor-parallel and pipeline axis
    node, local_rank        number of its machine in the pool, and its number there
    device                  "cpu" or "cuda:<index>"
    rendezvous              where ``verl.controller.rendezvous.join`` meets the others; None with one worker
    colocated               the objects of all roles in this process, by role, as far as they are made
    """

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    node: int = 0
    local_rank: int = 0
    device: str = "cpu"
    rendezvous: Rendezvous | None = None
    colocated: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Layout:
    """How many ranks hold one copy of a role: ``tp_size * pp_size``. The rest of a pool is data parallel.

    Ranks are numbered with the tensor-parallel axis fastest, then the pipeline, then data parallel: the ranks of one
    copy are neighbours.
    """

    tp_size: int = 1
    pp_size: int = 1

    def on(self, world_size: int) -> Grid:
        """This layout over ``world_size`` ranks. Raises ConfigError when they don't divide."""
        if self.tp_size < 1 or self.pp_size < 1:
            raise ConfigError(f"tp_size and pp_size are 1 or more, got tp_size={self.tp_size}, pp_size={self.pp_size}")
        if world_size % (self.tp_size * self.pp_size):
            raise ConfigError(
                f"{world_size} devices can't hold copies of tp_size={self.tp_size} times pp_size={self.pp_size} ranks: "
                f"their number must be a multiple of {self.tp_size * self.pp_size}; change the layout or the pool"
            )
        return Grid(world_size // (self.tp_size * self.pp_size), self.tp_size, self.pp_size)


@dataclass(frozen=True)
class Grid:
    """The ranks of one worker group along its three axes."""

    dp_size: int
    tp_size: int = 1
    pp_size: int = 1

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.dp_size * self.tp_size * self.pp_size

    def rank(self, dp_rank: int, *, tp_rank: int = 0, pp_rank: int = 0) -> int:
        """The rank at these coordinates."""
        return (dp_rank * self.pp_size + pp_rank) * self.tp_size + tp_rank

    def dp_rank(self, rank: int) -> int:
        """The data-parallel rank of ``rank``: ranks that share it see the same rows."""
        return rank // (self.tp_size * self.pp_size)

    def place(self, rank: int, *, node: int, local_rank: int, device: str, rendezvous: Rendezvous | None) -> Place:
        """The place of ``rank``."""
        return Place(
            rank=rank,
            world_size=self.world_size,
            dp_rank=self.dp_rank(rank),
            dp_size=self.dp_size,
            tp_rank=rank % self.tp_size,
            tp_size=self.tp_size,
            pp_rank=rank // self.tp_size % self.pp_size,
            pp_size=self.pp_size,
            node=node,
            local_rank=local_rank,
            device=device,
            rendezvous=rendezvous,
        )
