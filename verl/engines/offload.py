"""An optimizer whose moments lie in CPU memory between its steps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

CPU = torch.device("cpu")


class MomentsOnCPU:
    """While entered, the moments of ``optimizer`` are where its parameters are; otherwise in (pinned) CPU memory.

    Counters stay where they are. Where parameters are on the CPU nothing moves.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __enter__(self) -> None:
        for parameter in self.optimizer.state:
            self._move(parameter, parameter.device)

    def __exit__(self, *_: object) -> None:
        devices = {parameter.device for parameter in self.optimizer.state}
        for parameter in self.optimizer.state:
            self._move(parameter, CPU)
        for device in devices - {CPU}:
            torch.cuda.synchronize(device)  # or a checkpoint could read what hasn't arrived

    @torch.no_grad()
    def _move(self, parameter: Tensor, device: torch.device) -> None:
        """By exchanging storage: whoever holds the tensor keeps it."""
        for moment in self.optimizer.state[parameter].values():
            if moment.dim() > 0 and moment.device != device:
                moved = torch.empty(moment.shape, dtype=moment.dtype, device=device, pin_memory=device == CPU)
                moment.data = moved.copy_(moment, non_blocking=True)
