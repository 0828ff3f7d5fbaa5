"""Seeds that are functions of what they are for, so that no generator state has to be saved.

Every random draw of a run is keyed by (run seed, purpose, counters): the order of an epoch by (seed, epoch), a
response by (seed, step, row, sample). A resumed run computes the same keys and so makes the same draws.
"""

from __future__ import annotations

import random

import numpy
import torch

_MASK = (1 << 64) - 1


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from integers and words, by splitmix64 over their bytes; the same on every machine."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        words = part.to_bytes(16, "little", signed=True) if isinstance(part, int) else part.encode()
        for start in range(0, len(words), 8):
            state = _splitmix(state ^ int.from_bytes(words[start : start + 8], "little"))
        state = _splitmix(state ^ len(words))
    return state >> 1


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch (CPU and CUDA): weight initialisation and third-party code draw from these."""
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


def _splitmix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
