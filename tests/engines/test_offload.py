from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from verl.engines.offload import MomentsOnCPU


def stepped(device: str, offloads: bool, steps: int = 3) -> tuple[Tensor, dict[str, Tensor]]:
    """A weight after a few steps on fixed gradients, and the state of its optimizer between steps."""
    weight = nn.Parameter(torch.arange(6.0, device=device))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    moments = MomentsOnCPU(optimizer)
    for step in range(steps):
        weight.grad = torch.linspace(-1, 1, 6, device=device) * (step + 1)
        if offloads:
            with moments:
                optimizer.step()
        else:
            optimizer.step()
    return weight.detach().cpu(), optimizer.state[weight]


def test_moments_survive_between_steps() -> None:
    plain, offloaded = stepped("cpu", False), stepped("cpu", True)
    assert torch.equal(plain[0], offloaded[0])
    assert torch.equal(plain[1]["exp_avg"], offloaded[1]["exp_avg"]) and offloaded[1]["exp_avg"].abs().sum() > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_moments_leave_the_device() -> None:
    plain, offloaded = stepped("cuda", False), stepped("cuda", True)
    assert torch.equal(plain[0], offloaded[0])
    assert plain[1]["exp_avg"].is_cuda and plain[1]["exp_avg_sq"].is_cuda
    assert not offloaded[1]["exp_avg"].is_cuda and not offloaded[1]["exp_avg_sq"].is_cuda
    assert offloaded[1]["exp_avg"].is_pinned()
