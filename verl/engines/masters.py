"""Float32 masters under low-precision compute: the optimizer sees float32 weights, gradients and moments.

A float32 parameter is its own master. For any other, gradients of each micro-batch are added into a float32 buffer
as soon as they exist and the low-precision one is freed; after a step the parameter is rounded from its master.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Masters:
    """The float32 side of a module's trainable parameters, by parameter name."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.masters: dict[str, nn.Parameter] = {}
        for name, parameter in self.parameters.items():
            if parameter.dtype == torch.float32:
                self.masters[name] = parameter
                continue
            master = nn.Parameter(parameter.detach().float())
            parameter.register_post_accumulate_grad_hook(_collector(master))
            self.masters[name] = master

    @property
    def stepped(self) -> dict[str, nn.Parameter]:
        """What the optimizer sees."""
        return self.masters

    @property
    def separate(self) -> dict[str, Tensor]:
        """The masters that aren't the parameter itself: what a checkpoint must hold besides the model."""
        return {name: m.data for name, m in self.masters.items() if m is not self.parameters[name]}

    def expect_backward(self, is_last: bool) -> None:
        """Announce a backward pass: of no interest where gradients are whole at once."""

    def gradients(self) -> list[Tensor]:
        """The float32 gradients that exist."""
        return [m.grad for m in self.masters.values() if m.grad is not None]

    def clear_gradients(self) -> None:
        """There are none."""
        for master in self.masters.values():
            master.grad = None

    def grad_norm(self) -> Tensor:
        """2-norm over all parameters."""
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self.gradients())))
        return norm

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the parameters, in place: whoever shares their storage sees the update."""
        pairs = [(self.parameters[name], m) for name, m in self.masters.items() if m is not self.parameters[name]]
        if pairs:
            torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])

    @torch.no_grad()
    def adopt(self) -> None:
        """Set the masters from the parameters, after weights were loaded into the module."""
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                master.copy_(self.parameters[name])


def _collector(master: nn.Parameter):  # type: ignore[no-untyped-def]  # the hook's type is torch's own
    def collect(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return collect
