"""Pipeline parallelism: each rank of the pp axis holds a run of decoder layers; micro-batches flow through them.

In comes a network with all its layers; the first stage keeps the embedding, the last one the final norm and the head,
and every parameter keeps its name. Every stage knows the rows of every micro-batch, so only hidden states go forward
and their gradients back, each of its own size. It knows nothing of losses, batches or optimizers.

torch.distributed.pipelining isn't used: it wants micro-batches of one shape, so packed rows would have to be padded to
the longest, and it cuts one tensor along its first dim where each of our micro-batches brings an attention of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl.common.errors import ConfigError, UnsupportedModel
from verl.engines.mesh import Mesh
from verl.models.networks import Network, PackedRows

KEY = "pipeline_parallel_size"
Outputs = Mapping[str, Tensor]


class Stage:
    """This rank's part of ``network``, which is cut in place, and which stage has which parameter.

    Every rank holds the same weights beforehand. Comes before weights are sharded, whose names and shapes it keeps.
    Raises UnsupportedModel, by name, for a model whose parts transformers doesn't name, ConfigError naming
    ``pipeline_parallel_size`` for more stages than layers.
    """

    def __init__(self, network: Network, rank: int, num_stages: int) -> None:
        self.rank, self.last = rank, num_stages - 1
        self.module, self.entry = network.module, _Entry()
        runs = split_layers(network, num_stages)
        self.shapes = {name: parameter.shape for name, parameter in network.module.named_parameters()}
        self.owner = _owners(network, runs)
        self._tied = _tied_names(network)
        _cut(network, runs[rank], self.entry)

    @property
    def tied(self) -> str | None:
        """Name here of the weight that the first stage has as embedding and the last one as head, if there is one."""
        names = {0: self._tied[0], self.last: self._tied[1]} if self._tied else {}
        return names.get(self.rank)

    @property
    def copies(self) -> dict[str, str]:
        """Names here of parameters that another stage owns -> the owner's: they count in no norm."""
        here = [name for name, _ in self.module.named_parameters() if self.owner.get(name) != self.rank]
        return {name: self._tied[0] for name in here if self._tied}


class Pipeline:
    """Passes over micro-batches through this rank's ``stage`` and those beside it.

    network  the cut network, with whatever techniques were applied to it since
    dtype    of the hidden states between layers
    """

    def __init__(self, network: Network, stage: Stage, mesh: Mesh, device: torch.device, dtype: torch.dtype) -> None:
        assert mesh.pp_group is not None, "one stage is no pipeline"
        self.network, self.stage, self.device, self.dtype = network, stage, device, dtype
        self.group, self.rank, self.last = mesh.pp_group, mesh.pp_rank, mesh.pp_size - 1
        self.hidden_size = int(network.lm.module.config.get_text_config().hidden_size)
        self.sp_size = mesh.sp_size
        # NCCL wants the whole group in its first call, and what follows goes between pairs
        dist.all_reduce(torch.zeros(1, device=device), group=self.group)

    def learn(
        self,
        micro_batches: Iterable[PackedRows],
        entropy: bool,
        loss_of: Callable[[int, Outputs], Tensor],
        before_backward: Callable[[int], None],
    ) -> None:
        """Forward and backward of every micro-batch; gradients add up in the parameters.

        loss_of          on the last stage: index and outputs of a micro-batch to the scalar to differentiate
        before_backward  on every stage: told the index of the micro-batch

        The gradient of a weight that is embedding and head is summed over both stages. Order: one forward, one
        backward, after as many forwards as there are stages behind: no more micro-batches than that
        are held at once. Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1.
        """
        micro_batches = list(micro_batches)
        total = len(micro_batches)
        ahead = min(self.last - self.rank, total)
        flights: dict[int, tuple[Tensor | None, Tensor]] = {}

        def forward(index: int, received: Tensor | None) -> Tensor:
            outputs = self._forward(micro_batches[index], received, entropy)
            result = outputs if isinstance(outputs, Tensor) else loss_of(index, outputs)
            flights[index] = received, result
            return result.detach()

        def backward(index: int, gradient: Tensor | None) -> Tensor | None:
            before_backward(index)
            received, result = flights.pop(index)
            torch.autograd.backward(result, gradient)
            return None if received is None else received.grad

        following, previous = self.rank + 1, self.rank - 1
        for index in range(ahead):
            hidden = forward(index, self._swap(previous, None, micro_batches[index]))
            self._swap(following, hidden, None)
        received = self._swap(previous, None, micro_batches[ahead]) if ahead < total else None
        for index in range(total - ahead):
            newest = ahead + index
            hidden = forward(newest, received)
            gradient = backward(index, self._swap(following, hidden, micro_batches[index]))
            upcoming = micro_batches[newest + 1] if newest + 1 < total else None
            received = self._swap(previous, gradient, upcoming)
        for index in range(total - ahead, total):
            gradient = backward(index, self._swap(following, None, micro_batches[index]))
            self._swap(previous, gradient, None)
        if total and self.stage.tied is not None:
            self._add_tied_gradient(self.stage.tied)

    @torch.no_grad()
    def infer(self, micro_batches: Iterable[PackedRows], output: str) -> list[Tensor]:
        """``output`` of each micro-batch, [M] float32, on every stage."""
        micro_batches = list(micro_batches)
        lengths = [len(rows.targets) for rows in micro_batches]
        found = torch.empty(sum(lengths), device=self.device)
        pieces = list(found.split(lengths)) if lengths else []
        for rows, piece in zip(micro_batches, pieces, strict=True):
            outputs = self._forward(rows, self._swap(self.rank - 1, None, rows), entropy=False)
            if isinstance(outputs, Tensor):
                self._swap(self.rank + 1, outputs, None)
            else:
                piece.copy_(outputs[output])
        dist.broadcast(found, group=self.group, group_src=self.last)
        return pieces

    def from_last(self, thing: Any) -> Any:
        """What the last stage gave, on every stage; anything that pickles."""
        things = [thing]
        dist.broadcast_object_list(things, group=self.group, group_src=self.last)
        return things[0]

    @torch.no_grad()
    def full_tensors(self, own: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The parameters of all stages, one at a time, in the network's own order, on every stage.

        own  name and full tensor of this stage's, in the order of its module, all in ``dtype``
        """
        copies = self.stage.copies
        held = ((name, tensor) for name, tensor in own if name not in copies)
        for name, shape in self.stage.shapes.items():
            owner = self.stage.owner[name]
            if owner == self.rank:
                own_name, tensor = next(held)
                assert own_name == name, f"{own_name} came, {name} was due"
                tensor = tensor.to(self.device).contiguous()
            else:
                tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
            dist.broadcast(tensor, group=self.group, group_src=owner)
            yield name, tensor

    def _forward(self, rows: PackedRows, received: Tensor | None, entropy: bool) -> Tensor | Outputs:
        """Outputs on the last stage, hidden states [N, C] on others."""
        self.stage.entry.hidden = None if received is None else received[None]
        if self.rank == self.last:
            return self.network(rows, entropy)
        hidden = self.network.hidden(rows)
        assert hidden.dtype == self.dtype, f"hidden states are {hidden.dtype}, not {self.dtype}"
        return hidden

    def _swap(self, stage: int, sent: Tensor | None, rows: PackedRows | None) -> Tensor | None:
        """Send to ``stage`` and receive from it what belongs to ``rows`` [N, C], at once; None: nothing that way.

        At once, because two stages that send first would wait for each other.
        """
        if not 0 <= stage <= self.last:
            return None
        received = None
        if rows is not None:
            tokens = -(-len(rows.input_ids) // self.sp_size)  # a rank of a sequence has its share of them
            received = torch.empty(tokens, self.hidden_size, dtype=self.dtype, device=self.device)
        self._run(stage, sent, received)
        return received if received is None or not torch.is_grad_enabled() else received.requires_grad_()

    @torch.no_grad()
    def _add_tied_gradient(self, name: str) -> None:
        """Both stages add the same two numbers, so that the two copies stay equal to the last bit."""
        gradient = self.network.module.get_parameter(name).grad
        assert gradient is not None
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        own = local.to(self.device)  # gradients of offloaded weights lie elsewhere
        other = torch.empty_like(own)
        self._run(self.last - self.rank, own, other)
        local.add_(other.to(local.device))

    def _run(self, stage: int, sent: Tensor | None, received: Tensor | None) -> None:
        operations = []
        if sent is not None:
            operations.append(dist.P2POp(dist.isend, sent.contiguous(), group=self.group, group_peer=stage))
        if received is not None:
            operations.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=stage))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()


def split_layers(network: Network, num_stages: int) -> list[range]:
    """The decoder layers of each stage, consecutive; what is left over goes to the first ones: the last has the head.

    Raises UnsupportedModel and ConfigError.
    """
    layers = len(_layers(network))
    if layers < num_stages:
        raise ConfigError(f"{KEY}={num_stages} is more than the model's {layers} layers: set {KEY}<={layers}")
    each, left = divmod(layers, num_stages)
    ends = [each * (stage + 1) + min(stage + 1, left) for stage in range(num_stages)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _owners(network: Network, runs: Sequence[range]) -> dict[str, int]:
    """The stage of each parameter; of a tied weight the first one."""
    of_layer = {layer: stage for stage, run in enumerate(runs) for layer in run}
    prefix = next(f"{name}." for name, part in network.module.named_modules() if part is network.lm.backbone)
    owners = {}
    for name, _ in network.module.named_parameters():
        part, _, rest = name.removeprefix(prefix).partition(".")
        if not name.startswith(prefix) or part not in ("layers", "embed_tokens"):
            owners[name] = len(runs) - 1
        else:
            owners[name] = of_layer[int(rest.partition(".")[0])] if part == "layers" else 0
    return owners


def _tied_names(network: Network) -> tuple[str, str] | None:
    """Names of the weight that is embedding and head, as the embedding's and as the head's."""
    embedding = next(_part(network, "embed_tokens").parameters())
    every = network.module.named_parameters(remove_duplicate=False)
    names = [name for name, parameter in every if parameter is embedding]
    return (names[0], names[1]) if len(names) > 1 else None


class _Entry(nn.Module):
    """Stands where the embedding and the first layer were: gives what the stage before sent, [1, N, C]."""

    hidden: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Tensor:
        assert self.hidden is not None
        return self.hidden


class _Passage(nn.Module):
    """Stands where another stage has a part; hidden states pass. Some models ask a layer for its plain attributes."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        for name, value in vars(part).items():
            if isinstance(value, (str, int, float, bool)):
                setattr(self, name, value)

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


def _cut(network: Network, own: range, entry: _Entry) -> None:
    """Put stand-ins where other stages have their parts, so that names and places stay."""
    backbone, layers = network.lm.backbone, _layers(network)
    for index, layer in enumerate(layers):
        if index not in own:
            layers[index] = _Passage(layer)
    if own.start > 0:
        layers[0] = backbone.embed_tokens = entry
    if own.stop < len(layers):
        backbone.norm = _Passage(_part(network, "norm"))
        for name, part in network.module.named_children():
            if not any(inner is backbone for inner in part.modules()):
                setattr(network.module, name, _Passage(part))
        network.lm.head = _Passage(network.lm.head)


def _layers(network: Network) -> nn.ModuleList:
    layers = _part(network, "layers")
    assert isinstance(layers, nn.ModuleList)
    return layers


def _part(network: Network, name: str) -> nn.Module:
    """The part of the backbone that transformers' plan of pipelines knows as ``name``. Raises UnsupportedModel."""
    lm = network.lm
    plan = lm.module.config.get_text_config().base_model_pp_plan or {}
    if set(plan) != {"embed_tokens", "layers", "norm"}:
        raise UnsupportedModel(
            f"{lm.name!r} ({type(lm.module).__name__}) can't be cut into stages: transformers' plan of its parts is "
            f"{list(plan) or 'missing'}, not embed_tokens, layers and norm. Set {KEY}=1"
        )
    return lm.backbone.get_submodule(name)
