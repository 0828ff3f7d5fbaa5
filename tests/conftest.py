"""One thread a process: tiny tensors don't need more, and a crowded machine is slowed down by them."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():  # before anything imports triton, whose own functions are decorated then
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    """What was imported and collected stays: the collector needn't look at it again and again."""
    gc.collect()
    gc.freeze()
