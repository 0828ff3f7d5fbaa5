from __future__ import annotations

import psutil
import pytest
import torch

from verl.observe.memory import peak_memory_bytes, process_peak_bytes, reset_peak_memory


def test_the_process_peak_is_in_bytes_and_never_falls() -> None:
    held = psutil.Process().memory_info().rss
    before = process_peak_bytes()
    assert held * 0.9 < before < psutil.virtual_memory().total * 2
    block = torch.ones(64 << 20, dtype=torch.uint8)
    after = process_peak_bytes()
    del block
    assert process_peak_bytes() >= after >= before
    reset_peak_memory(torch.device("cpu"))
    assert peak_memory_bytes(torch.device("cpu")) >= after


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_peak_can_be_reset() -> None:
    device = torch.device("cuda", 0)
    reset_peak_memory(device)
    start = peak_memory_bytes(device)
    block = torch.ones(1 << 20, dtype=torch.uint8, device=device)
    assert peak_memory_bytes(device) >= start + (1 << 20)
    del block
    reset_peak_memory(device)
    assert peak_memory_bytes(device) == start
