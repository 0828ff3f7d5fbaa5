"""The passes of an engine over packed micro-batches where one rank has all layers: one after the other.

A pipeline offers the same methods for ranks that have some layers each. Knows nothing of how gradients are reduced or
what a loss is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from verl.models.networks import Network, PackedRows

Outputs = Mapping[str, Tensor]
"""A network's named outputs on one micro-batch, each [M] float32."""


class OneStage:
    """Forward and backward passes of ``network``."""

    def __init__(self, network: Network) -> None:
        self.network = network

    def learn(
        self,
        micro_batches: Iterable[PackedRows],
        entropy: bool,
        loss_of: Callable[[int, Outputs], Tensor],
        before_backward: Callable[[int], None],
    ) -> None:
        """Forward and backward of every micro-batch; gradients add up in the parameters.

        micro_batches    taken one by one: the next is packed while the device is at work on the last
        loss_of          index and outputs of a micro-batch to the scalar to differentiate
        before_backward  told the index of the micro-batch
        """
        for index, rows in enumerate(micro_batches):
            loss = loss_of(index, self.network(rows, entropy))
            before_backward(index)
            loss.backward()

    @torch.no_grad()
    def infer(self, micro_batches: Iterable[PackedRows], output: str) -> Iterator[Tensor]:
        """``output`` of each micro-batch: [M] float32."""
        for rows in micro_batches:
            yield self.network(rows)[output].float()

    def from_last(self, thing: Any) -> Any:
        """What the rank with the outputs gave."""
        return thing

    def full_tensors(self, own: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The parameters of all stages, by name."""
        yield from own
