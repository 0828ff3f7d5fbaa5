"""Fully sharded parameters: each rank of the mesh's "dp_sp" axis keeps a slice of every weight, gradient and moment.

In comes a network with all its weights, out goes the same network, whose layers gather their weights when they run and
hand each rank the sum of its slice's gradients. Trained weights are float32 slices, gathered in the compute type; a
module that only infers keeps its own type. Gradients are added in float32 and never divided here. It knows nothing of
losses, batches or optimizers.

Source: PyTorch FSDP2 (``torch.distributed.fsdp.fully_shard``); Zhao et al. 2023, arXiv:2304.11277.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl.common.transfer import to_device
from verl.engines.config import EngineConfig, TrainedConfig
from verl.engines.mesh import SHARDING_AXIS, Mesh
from verl.models.networks import Network, PackedRows, decoder_layers

T = TypeVar("T")


class ShardedNetwork:
    """``network`` with every decoder layer a unit of its own, and all else (embedding, norm, heads) one more.

    The last unit's forward is the whole network's, and it stays gathered: a head that is called by itself, or tied to
    the embedding, finds its weight from the first token in to the last gradient out.
    """

    def __init__(self, network: Network, mesh: Mesh, config: EngineConfig, *, is_trained: bool) -> None:
        self.module = network.module
        self.lm = network.lm
        self.offset = network.offset
        self.dtype = next(self.module.parameters()).dtype
        self._network, self._root = network, _Whole(network.module)
        self._stays_gathered = isinstance(config, TrainedConfig) and not config.reshard_after_forward
        units = [*decoder_layers(self.lm.backbone), self._root]
        for unit in units:
            if is_trained:
                _to_float32(unit)
            fully_shard(
                unit,
                mesh=mesh.axis(SHARDING_AXIS),
                reshard_after_forward=not self._stays_gathered and unit is not self._root,
                mp_policy=MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32),
                offload_policy=_offload_policy(mesh) if config.offload_parameters else OffloadPolicy(),
            )
        for sharded in self._units():
            sharded.set_gradient_divide_factor(1.0)  # sums stay sums
            sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum
        self._unit_of: dict[nn.Module, Any] = {part: unit for unit in reversed(units) for part in unit.modules()}
        with torch.no_grad():
            self._run(lambda: None)  # units that gather before a first forward pass must know each other

    def __call__(self, rows: PackedRows, entropy: bool = False) -> dict[str, Tensor]:
        return self._run(lambda: _owned(self._network(rows, entropy)))

    def _run(self, forward: Callable[[], T]) -> T:
        outputs: T = self._root(forward)
        if not torch.is_grad_enabled():  # no backward pass will free them, and the next step would find them stale
            for unit in self._units():
                unit.reshard()
        return outputs

    def hidden(self, rows: PackedRows) -> Tensor:
        """Hidden states [N, C] of the layers that are here, for the next stage of a pipeline."""
        return self._run(lambda: _owned({"hidden": self._network.hidden(rows)}))["hidden"]

    def full_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Parameters whole, in the compute type, on the device that computes: copies.

        Every rank must go through all of them. Names of one unit that follow each other come of one gathering.
        """
        for unit, run in groupby(names, key=lambda name: self._unit_of[self._owner(name)]):
            unit.unshard()
            whole = [(name, self._copy(name)) for name in run]
            unit.reshard()  # before the caller has one and goes no further: gathered weights would grow stale
            yield from whole

    def _copy(self, name: str) -> Tensor:
        gathered = self.module.get_parameter(name).detach()
        return (gathered.full_tensor() if isinstance(gathered, DTensor) else gathered).clone()

    def _owner(self, name: str) -> nn.Module:
        return self.module.get_submodule(name.rpartition(".")[0])

    def expect_backward(self, is_last: bool) -> None:
        """Whether the coming backward pass is the update's last. Where weights stay gathered, they do until then, and
        whole gradients wait for it: one gathering and one reduction an update instead of one a micro-batch."""
        if self._stays_gathered and isinstance(self._root, FSDPModule):
            self._root.set_requires_gradient_sync(is_last)
            self._root.set_reshard_after_backward(is_last)

    def _units(self) -> Iterator[FSDPModule]:
        return (part for part in self._root.modules() if isinstance(part, FSDPModule))


def _owned(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a view FSDP would warn."""
    return {name: values.clone() for name, values in outputs.items()}


class _Whole(nn.Module):
    """A module's forward that is whatever it is given, so that all which a network calls lies within it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


class Shards:
    """The float32 slices of a sharded network's trainable parameters, by parameter name.

    masters  the sharded parameters
    stepped  this rank's slices of them as plain tensors: what the optimizer sees
    copies  name here -> name of the parameter that it is a copy of, whose owner is another pipeline stage. It goes by
            that name, so that a checkpoint holds it once
    """

    def __init__(
        self, network: ShardedNetwork, mesh: Mesh, device: torch.device, copies: Mapping[str, str] | None = None
    ) -> None:
        copies = copies or {}
        self.network, self.mesh, self.device, self.copies = network, mesh, device, frozenset(copies.values())
        self.masters: dict[str, nn.Parameter] = {
            copies.get(name, name): p for name, p in network.module.named_parameters() if p.requires_grad
        }
        # plain tensors of the same storage: an optimizer takes a hundred times as long to look at sharded ones
        self.stepped = {name: nn.Parameter(local_part(m.detach())) for name, m in self.masters.items()}
        self._holders = {name: holders(m, mesh) for name, m in self.masters.items()}

    @property
    def separate(self) -> dict[str, Tensor]:
        """The masters that the compute type has no room for: what a checkpoint must hold besides the model."""
        return {} if self.network.dtype == torch.float32 else {name: m.data for name, m in self.masters.items()}

    def expect_backward(self, is_last: bool) -> None:
        """Announce a backward pass; gradients are complete after the last one."""
        self.network.expect_backward(is_last)

    def gradients(self) -> list[Tensor]:
        """This rank's slices of the gradients that exist, to be changed in place; ``stepped`` has them from now on."""
        for name, master in self.masters.items():
            self.stepped[name].grad = None if master.grad is None else local_part(master.grad)
        return [p.grad for p in self.stepped.values() if p.grad is not None]

    def clear_gradients(self) -> None:
        """There are none."""
        for parameter in (*self.masters.values(), *self.stepped.values()):
            parameter.grad = None

    def grad_norm(self) -> Tensor:
        """2-norm over all parameters, the same on every rank. A slice that several ranks hold counts once."""
        found = {n: p.grad for n, p in self.stepped.items() if p.grad is not None and n not in self.copies}
        squares = torch.zeros((), device=self.device)
        if found:
            norms = torch.stack(torch._foreach_norm(list(found.values())))
            alike = to_device(torch.tensor([self._holders[name] for name in found]), self.device)
            squares += (norms.to(self.device).square() / alike).sum()
        for axis in (SHARDING_AXIS, "tp", "pp"):
            if self.mesh.size(axis) > 1:
                dist.all_reduce(squares, group=self.mesh.group(axis))
        return squares.sqrt()

    def publish(self) -> None:
        """Nothing to do: the next forward pass gathers the new slices."""

    def adopt(self) -> None:
        """Nothing to do: weights that are loaded are the masters."""


def holders(parameter: Tensor, mesh: Mesh) -> int:
    """Ranks of ``mesh`` that hold the same slice of ``parameter``; those of other pipeline stages don't count."""
    if not isinstance(parameter, DTensor):
        return 1
    places = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
    # not is_shard(): what tp cuts along the same dim is sharded by a placement that isn't a Shard
    cut = {axis for axis, placement in places if not placement.is_replicate()}
    return math.prod(mesh.size(axis) for axis in (SHARDING_AXIS, "tp") if axis not in cut)


def sliced_like(whole: Tensor, parameter: Tensor) -> Tensor:
    """What the rank of ``parameter`` holds of ``whole``: cut along the last axis first, as such slices are made."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    for axis in reversed(range(mesh.ndim)):
        placement: Any = parameter.placements[axis]
        if not placement.is_replicate():
            pieces, rank = whole.chunk(mesh.size(axis), placement.dim), mesh.get_local_rank(axis)
            whole = pieces[rank] if rank < len(pieces) else whole.narrow(placement.dim, 0, 0)
    return whole


@torch.no_grad()
def sharded_like(local: Tensor, parameter: DTensor) -> DTensor:
    """``local``, of the shape of this rank's slice of ``parameter``, as the slice of a tensor sharded like it."""
    sharded = parameter.detach()
    assert isinstance(sharded, DTensor)
    sharded.to_local().data = local
    return sharded


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _to_float32(unit: nn.Module) -> None:
    """One unit at a time, so that a whole float32 copy of the model never exists."""
    for parameter in unit.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            # whoever ties or optimizes the parameter keeps it; `data =` leaves the inside of a DTensor as it was
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().float()))


def _offload_policy(mesh: Mesh) -> CPUOffloadPolicy:
    assert mesh.device_mesh is not None
    return CPUOffloadPolicy(pin_memory=mesh.device_mesh.device_type == "cuda")
