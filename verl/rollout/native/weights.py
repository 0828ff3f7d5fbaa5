"""The shared module's weights: whether they are those that the version names, and taking new ones.

A change is seen by the version counters that torch keeps on every parameter: an optimizer's step, a copy and a merge
of an adapter raise them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from verl.common.errors import ConfigError, ShapeError, StaleWeights, did_you_mean


class Weights:
    """Watches the parameters of ``module``."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._half_loaded = False
        self.accept()
        self._places = self._addresses()

    def accept(self) -> None:
        """The weights as they are now are the ones that the version names."""
        self._half_loaded = False
        self._seen = self._changes()

    def check_fresh(self, version: int) -> None:
        """Raise StaleWeights if weights were changed since ``accept``."""
        if self._half_loaded:
            raise StaleWeights("the last load_weights didn't end well: load a whole set of weights before generating")
        if self._changes() != self._seen:
            raise StaleWeights(
                f"the model's weights were changed after version {version} was announced: call "
                "weights_changed(version) before generating: it drops cached keys and versions the responses"
            )

    def moved(self) -> bool:
        """Whether parameters lie at other addresses than at the last call: captured graphs would read the old ones."""
        before, self._places = self._places, self._addresses()
        return before != self._places

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors into the parameters and buffers of the same names; all parameters must come."""
        targets = self._module.state_dict()
        self._half_loaded = True
        loaded = set()
        with torch.no_grad():
            for name, tensor in weights:
                if name not in targets:
                    raise ConfigError(f"the model has no weight {name!r}{did_you_mean(name, targets)}")
                target = targets[name]
                if target.shape != tensor.shape:
                    raise ShapeError(f"weight {name!r} has shape {list(target.shape)}, got {list(tensor.shape)}")
                target.copy_(tensor)
                loaded.add(target.data_ptr())
        missing = [name for name, p in self._module.named_parameters() if p.data_ptr() not in loaded]
        if missing:
            raise StaleWeights(f"load_weights got no value for {len(missing)} parameters, the first is {missing[0]!r}")
        self.accept()

    def _changes(self) -> int:
        return sum(p._version for p in self._module.parameters() if not p.is_inference())

    def _addresses(self) -> list[int]:
        return [p.data_ptr() for p in self._module.parameters()]
