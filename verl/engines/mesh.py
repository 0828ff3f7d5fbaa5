"""How the ranks of a run share one model: axes "dp", "pp", "sp" and "tp" of one device mesh.

Sizes of the three model axes come in; data parallel is what is left of the world. Ranks that differ only in "tp", "pp"
or "sp" work on the same rows. It knows nothing of modules, batches or losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from pydantic import Field
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl.common.errors import ConfigError
from verl.common.ranks import is_distributed
from verl.common.section import Section

AXES = ("dp", "pp", "sp", "tp")
SHARDING_AXIS = "dp_sp"
"""The "dp" and "sp" axes as one: ranks that hold the same parameters and see different tokens."""


class ParallelConfig(Section):
    """How many ranks hold one copy of a model. Data parallel is what is left: world size / product of these."""

    tensor_parallel_size: int = Field(1, ge=1)
    """Ranks that split every matrix of a layer."""
    pipeline_parallel_size: int = Field(1, ge=1)
    """Stages of consecutive layers, each on ranks of its own."""
    sequence_parallel_size: int = Field(1, ge=1)
    """Ranks that split the tokens of a micro-batch; for rows too long for one."""

    @property
    def ranks_per_model(self) -> int:
        """Ranks that work on the same rows."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.sequence_parallel_size


@dataclass(frozen=True)
class Mesh:
    """This rank's place among all ranks.

    device_mesh    the axes of ``AXES``, or None where there is one rank
    sharding_mesh  its "dp" and "sp" axes as one
    """

    device_mesh: DeviceMesh | None = None
    sharding_mesh: DeviceMesh | None = None

    @staticmethod
    def single() -> Mesh:
        """One rank, no process group."""
        return Mesh(None)

    @staticmethod
    def build(config: ParallelConfig, device_type: str) -> Mesh:
        """The mesh of all ranks of the default process group, or ``single()`` without one or with one rank in it.

        Raises ConfigError naming the keys whose product doesn't divide the number of ranks.
        """
        world_size = dist.get_world_size() if is_distributed() else 1
        dp_size = data_parallel_size(config, world_size)
        if world_size == 1:
            return Mesh.single()
        sizes = (
            dp_size,
            config.pipeline_parallel_size,
            config.sequence_parallel_size,
            config.tensor_parallel_size,
        )
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
        return Mesh(mesh, mesh["dp", "sp"]._flatten(SHARDING_AXIS))

    def axis(self, name: str) -> DeviceMesh:
        """The one-dimensional mesh of this rank's peers along ``name`` ("dp", "pp", "sp", "tp" or "dp_sp")."""
        assert self.device_mesh is not None and self.sharding_mesh is not None, "one rank has no axes"
        return self.sharding_mesh if name == SHARDING_AXIS else self.device_mesh[name]

    def size(self, axis: str) -> int:
        """Ranks along ``axis``; 1 without a mesh."""
        return 1 if self.device_mesh is None else self.axis(axis).size()

    def rank(self, axis: str) -> int:
        """This rank's place along ``axis``; 0 without a mesh."""
        return 0 if self.device_mesh is None else self.axis(axis).get_local_rank()

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The process group along ``axis``; None without a mesh."""
        return None if self.device_mesh is None else self.axis(axis).get_group()

    @property
    def dp_size(self) -> int:
        """Ranks with rows of their own."""
        return self.size("dp")

    @property
    def dp_rank(self) -> int:
        """Which share of the rows is this rank's."""
        return self.rank("dp")

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the other rows."""
        return self.group("dp")

    @property
    def pp_size(self) -> int:
        """Pipeline stages."""
        return self.size("pp")

    @property
    def pp_rank(self) -> int:
        """This rank's stage; the last one computes the outputs."""
        return self.rank("pp")

    @property
    def pp_group(self) -> dist.ProcessGroup | None:
        """The other stages of this copy of the model."""
        return self.group("pp")

    @property
    def sp_size(self) -> int:
        """Ranks that split the tokens of a micro-batch."""
        return self.size("sp")

    @property
    def sp_rank(self) -> int:
        """Which run of a micro-batch's tokens is this rank's."""
        return self.rank("sp")

    @property
    def sp_group(self) -> dist.ProcessGroup | None:
        """The ranks with the other tokens of the same rows."""
        return self.group("sp")

    @property
    def tp_size(self) -> int:
        """Ranks that split the matrices."""
        return self.size("tp")

    @property
    def tp_rank(self) -> int:
        """Which part of every matrix is this rank's."""
        return self.rank("tp")

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The ranks with the other parts of the same matrices."""
        return self.group("tp")


def data_parallel_size(config: ParallelConfig, world_size: int) -> int:
    """Ranks with rows of their own among ``world_size``.

    Raises ConfigError naming the keys where a model's ranks don't divide the world.
    """
    if world_size % config.ranks_per_model:
        asked = [f"{key}={size}" for key, size in config.model_dump().items() if size > 1]
        raise ConfigError(
            f"{' x '.join(asked)} takes {config.ranks_per_model} ranks a model, which doesn't divide the {world_size} "
            f"rank{'s' * (world_size > 1)} that were launched: lower {' or '.join(k.split('=')[0] for k in asked)}, "
            "or launch a multiple"
        )
    return world_size // config.ranks_per_model
