"""Tensors on their way to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``, without waiting for what a GPU still has to do.

    A copy from pageable memory would hold the program up until all before it is done; the pinned copy that this one
    goes through is kept by torch until it has arrived.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
