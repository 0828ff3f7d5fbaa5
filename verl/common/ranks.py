"""This process among those of torch.distributed's default group, if there is one."""

from __future__ import annotations

import torch.distributed as dist


def is_distributed() -> bool:
    """Whether there is a default process group, be it of one process."""
    return dist.is_available() and dist.is_initialized()


def own_rank() -> int:
    """Rank of this process; 0 without a group."""
    return dist.get_rank() if is_distributed() else 0


def is_first_rank() -> bool:
    """Whether this process writes what all ranks hold alike."""
    return own_rank() == 0
