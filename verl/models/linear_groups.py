"""Linear layers that read one input (query, key and value; gate and up) as one matrix product.

Their weights are laid side by side in one storage, once: every Parameter object stays and becomes a view of its rows,
so optimizers, state dicts and whoever holds a parameter go on as before, and no weight exists twice. The forwards that
``LinearGroup`` hands out know no gradients. Nothing here knows a model's name: groups are found by watching a forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as product


class LinearGroup:
    """Layers in the order of their calls: of one type and device, with as many inputs, all with a bias or none."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = tuple(layers)

    def lay_side_by_side(self) -> bool:
        """Move the weights, and the biases, into one storage, where they aren't in one.

        Returns False, with nothing moved, where one of them is a part of some other storage, which may be read whole.
        Takes the memory of one group while it copies.
        """
        kinds = [tensors for tensors in (self._weights(), self._biases()) if tensors]
        scattered = [tensors for tensors in kinds if not _are_side_by_side(tensors)]
        if any(tensor.untyped_storage().nbytes() != tensor.nbytes for tensors in scattered for tensor in tensors):
            return False
        for tensors in scattered:
            _lay_side_by_side(tensors)
        return True

    def forwards(self) -> list[tuple[nn.Linear, Callable[[Tensor], Tensor]]]:
        """A forward for each layer, for as long as the weights stay where they are: slices of one product.

        Empty where the weights no longer lie side by side, as after a move to another device.
        """
        weights, biases = self._weights(), self._biases()
        if not _are_side_by_side(weights) or (biases and not _are_side_by_side(biases)):
            return []
        shared = _SharedProduct(self.layers, _whole(weights), _whole(biases) if biases else None)
        followers = [(layer, partial(shared.follow, i)) for i, layer in enumerate(self.layers) if i]
        return [(self.layers[0], shared.lead), *followers]

    def _weights(self) -> list[Tensor]:
        return [layer.weight for layer in self.layers]

    def _biases(self) -> list[Tensor]:
        return [layer.bias for layer in self.layers if layer.bias is not None]


class _SharedProduct:
    """One product for all layers at the call of the first; the others take their slice of it, once each."""

    def __init__(self, layers: Sequence[nn.Linear], weight: Tensor, bias: Tensor | None) -> None:
        self._layers, self._weight, self._bias = layers, weight, bias
        self._sizes = [layer.weight.shape[0] for layer in layers]
        self._input: Tensor | None = None
        self._slices: dict[int, Tensor] = {}

    def lead(self, x: Tensor) -> Tensor:
        """x [..., C]; returns the first layer's [..., outs], a slice of all layers' outputs."""
        out: Tensor = product(x, self._weight, self._bias)
        self._input, self._slices = x, dict(enumerate(out.split(self._sizes, -1)))
        return self._slices.pop(0)

    def follow(self, index: int, x: Tensor) -> Tensor:
        """The slice of a later layer, if ``x`` is the very tensor that the first was called with; else its own."""
        found = self._slices.pop(index, None) if x is self._input else None
        if not self._slices:
            self._input = None
        if found is not None:
            return found
        own: Tensor = product(x, self._layers[index].weight, self._layers[index].bias)
        return own


def shared_inputs(module: nn.Module, run: Callable[[], object]) -> list[LinearGroup]:
    """Layers below one parent that ``run``, a forward of ``module``, calls with one and the same tensor.

    Their weights lie side by side on return. Only plain layers without hooks are taken, and no weight that is
    tied to another.
    """
    held: list[Tensor] = []  # as long as it lives no other tensor has its id
    called: dict[tuple[str, int], list[nn.Linear]] = {}
    times: Counter[nn.Linear] = Counter()

    def note(parent: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        times[layer] += 1
        if inputs:
            held.append(inputs[0])
            called.setdefault((parent, id(inputs[0])), []).append(layer)

    handles = [
        layer.register_forward_pre_hook(partial(note, name.rpartition(".")[0])) for name, layer in _plain(module)
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    groups = [LinearGroup(layers) for layers in called.values() if len(layers) > 1 and _fit(layers)]
    return [g for g in groups if all(times[layer] == 1 for layer in g.layers) and g.lay_side_by_side()]


def _plain(module: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Linear layers, by name, that are nothing but a product with weights of their own."""
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    return [
        (name, layer)
        for name, layer in module.named_modules()
        if type(layer) is nn.Linear
        and "forward" not in vars(layer)
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
        and all(type(p) is nn.Parameter and uses[id(p)] == 1 for p in layer.parameters())
    ]


def _fit(layers: Sequence[nn.Linear]) -> bool:
    first = layers[0].weight
    return all(
        (w.dtype, w.device, w.shape[1]) == (first.dtype, first.device, first.shape[1])
        and w.is_contiguous()
        and (layer.bias is None) == (layers[0].bias is None)
        and (layer.bias is None or (layer.bias.dtype, layer.bias.device) == (w.dtype, w.device))
        for layer, w in ((layer, layer.weight) for layer in layers)
    )


def _are_side_by_side(tensors: Sequence[Tensor]) -> bool:
    address = tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != address or not tensor.is_contiguous():
            return False
        address += tensor.nbytes
    storage = tensors[0].untyped_storage()  # two storages may lie behind one another by chance
    return address <= storage.data_ptr() + storage.nbytes()


def _lay_side_by_side(tensors: Sequence[Tensor]) -> None:
    sizes = [tensor.shape[0] for tensor in tensors]
    whole = torch.empty(sum(sizes), *tensors[0].shape[1:], dtype=tensors[0].dtype, device=tensors[0].device)
    for tensor, rows in zip(tensors, whole.split(sizes), strict=True):
        rows.copy_(tensor.detach())
        tensor.data = rows


def _whole(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors that lie side by side, as one."""
    first = tensors[0].detach()
    return first.as_strided((sum(tensor.shape[0] for tensor in tensors), *first.shape[1:]), first.stride())
