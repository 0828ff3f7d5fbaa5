"""Memory and disk of this process, in bytes. Knows nothing of what they hold."""

from __future__ import annotations

import sys

import psutil  # type: ignore[import-untyped,unused-ignore]
import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes that tensors held on a GPU since ``reset_peak_memory``; on the CPU, ``process_peak_bytes``."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else process_peak_bytes()


def reset_peak_memory(device: torch.device) -> None:
    """Begin a new peak on a GPU. On the CPU there is nothing to do: its peak counts from the start of the process."""
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(device)


def process_peak_bytes() -> int:
    """Most bytes of main memory that this process has held since its start."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kibibytes


def available_bytes() -> int:
    """Main memory that can still be had on this machine. A container's own limit isn't seen."""
    return int(psutil.virtual_memory().available)
