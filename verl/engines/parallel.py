"""A network on a mesh: the techniques that the mesh asks for, applied in their order.

Tensor parallel cuts the matrices, a pipeline keeps a run of the layers, FSDP shards what is left of them, sequence
parallel splits the tokens that come in.
One rank gets the network as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

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


class Parallelized(NamedTuple):
    """A network over the ranks of a mesh.

    weights       its float32 weights if it is trained
    passes        how micro-batches pass through it
    full_tensors  names of parameters that are here to the whole tensors, in the compute type
    """

    network: Network
    weights: Masters | Shards | None
    passes: OneStage | Pipeline
    full_tensors: Callable[[Iterable[str]], Iterator[tuple[str, Tensor]]]


def parallelize(
    network: Network, config: EngineConfig, mesh: Mesh, device: torch.device, label: str, *, is_trained: bool
) -> Parallelized:
    """``network`` over the ranks of ``mesh``, its module changed in place.

    Every rank holds the same weights beforehand. ``label`` is the role, for messages.
    Raises ConfigError naming the key that can't be, UnsupportedModel for a model that can't be cut.
    """
    if mesh.device_mesh is None:
        if config.offload_parameters:
            raise ConfigError(
                f"{label}.offload_parameters=true needs several ranks, whose slices can lie in CPU memory, and there "
                f"is one: set it to false{' (offload_optimizer works on one)' if is_trained else ''}"
            )
        masters = Masters(network.module) if is_trained else None
        return Parallelized(network, masters, OneStage(network), partial(_converted, network.module))
    if has_adapter(network.module):
        _check_adapter(mesh.tp_size, mesh.pp_size, label)
    dtype = next(network.module.parameters()).dtype
    apply_tensor_parallel(network.lm, mesh)
    stage = Stage(network, mesh.pp_rank, mesh.pp_size) if mesh.pp_size > 1 else None
    sharded = ShardedNetwork(network, mesh, config, is_trained=is_trained)
    shards = Shards(sharded, mesh, device, stage.copies if stage else None) if is_trained else None
    whole = SequenceParallelNetwork(sharded, mesh) if mesh.sp_size > 1 else sharded
    passes = Pipeline(whole, stage, mesh, device, dtype) if stage else OneStage(whole)
    return Parallelized(whole, shards, passes, sharded.full_tensors)


def _converted(module: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    dtype = next(module.parameters()).dtype
    return ((name, module.get_parameter(name).detach().to(dtype)) for name in names)


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
