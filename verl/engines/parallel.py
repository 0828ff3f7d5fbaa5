"""A network on a mesh: the techniques that the mesh asks for, applied in their order.

Tensor parallel cuts the matrices, a pipeline keeps a run of the layers, FSDP shards what is left of them, sequence
parallel splits the tokens that come in.
One rank gets the network as it is.
"""

from __future__ import annotations

import torch

from verl.common.errors import ConfigError, UnsupportedModel
from verl.engines.config import EngineConfig
from verl.engines.fsdp import ShardedNetwork, Shards
from verl.engines.masters import Masters
from verl.engines.mesh import Mesh, ParallelConfig
from verl.engines.passes import OneStage
from verl.engines.pipeline import Pipeline, Stage, split_layers
from verl.engines.sequence import SequenceParallelNetwork, check_heads
from verl.engines.tensor import apply_tensor_parallel, heads_of_a_rank
from verl.models.lora import has_adapter
from verl.models.networks import Network


def parallelize(
    network: Network, config: EngineConfig, mesh: Mesh, device: torch.device, label: str, *, is_trained: bool
) -> tuple[Network, Masters | Shards | None, OneStage | Pipeline]:
    """``network`` over the ranks of ``mesh``, its module changed in place; its float32 weights if it is trained; how
    micro-batches pass through it.

    Every rank holds the same weights beforehand. ``label`` is the role, for messages.
    Raises ConfigError naming the key that can't be, UnsupportedModel for a model that can't be cut.
    """
    if mesh.device_mesh is None:
        if config.offload_parameters:
            raise ConfigError(
                f"{label}.offload_parameters=true needs several ranks, whose slices can lie in CPU memory, and there "
                f"is one: set it to false{' (offload_optimizer works on one)' if is_trained else ''}"
            )
        return network, Masters(network.module) if is_trained else None, OneStage(network)
    if has_adapter(network.module):
        _check_adapter(mesh.tp_size, mesh.pp_size, label)
    dtype = next(network.module.parameters()).dtype
    apply_tensor_parallel(network.lm, mesh)
    stage = Stage(network, mesh.pp_rank, mesh.pp_size) if mesh.pp_size > 1 else None
    sharded = ShardedNetwork(network, mesh, config, is_trained=is_trained)
    shards = Shards(sharded, mesh, device, stage.copies if stage else None) if is_trained else None
    whole = SequenceParallelNetwork(sharded, mesh) if mesh.sp_size > 1 else sharded
    return whole, shards, Pipeline(whole, stage, mesh, device, dtype) if stage else OneStage(whole)


def check_cuts(network: Network, config: ParallelConfig, label: str, *, with_adapter: bool = False) -> None:
    """Raise ConfigError or UnsupportedModel, as the ranks would, for a model that ``config`` can't cut.

    An outline of the network, on the meta device, is enough; ``with_adapter``: whether the model is to have one.
    """
    if with_adapter:
        _check_adapter(config.tensor_parallel_size, config.pipeline_parallel_size, label)
    try:
        heads = heads_of_a_rank(network.lm, config.tensor_parallel_size)
        if config.sequence_parallel_size > 1:
            check_heads(heads, config.sequence_parallel_size)
        if config.pipeline_parallel_size > 1:
            split_layers(network, config.pipeline_parallel_size)
    except (ConfigError, UnsupportedModel) as error:
        raise type(error)(f"{label}.parallel: {error}") from None


def _check_adapter(tp_size: int, pp_size: int, label: str) -> None:
    for key, size in (("tensor_parallel_size", tp_size), ("pipeline_parallel_size", pp_size)):
        if size > 1:
            raise ConfigError(
                f"{label}.parallel.{key}={size} can't be with an adapter (model.lora), whose layers aren't cut: set it "
                "to 1, and let FSDP spread the weights over the ranks"
            )
