from __future__ import annotations

import pytest
import torch

from verl.common.transfer import to_device

CPU = torch.device("cpu")


def test_what_is_there_stays_as_it_is() -> None:
    tensor = torch.arange(3)
    assert to_device(tensor, CPU) is tensor


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_busy_gpu_holds_nobody_up() -> None:
    device = torch.device("cuda")
    for tensor in (torch.arange(100_000), torch.zeros(0), torch.rand(3, 4).T):
        end = torch.cuda.Event()
        torch.cuda._sleep(1_000_000_000)
        arrived = to_device(tensor, device)
        end.record()
        assert not end.query(), "the copy was waited for"
        assert torch.equal(arrived.cpu(), tensor)
