from pathlib import Path

import pytest
import torch
from torch import nn

from verl.common.errors import CheckpointError
from verl.engines.saved_optimizer import load_optimizer, save_optimizer


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        module(torch.randn(5, 3, generator=generator)).square().sum().backward()
        optimizer.step()


MAKERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_resumed_optimizer_goes_on_bitwise(tmp_path: Path, kind: str) -> None:
    straight = network()
    optimizer = MAKERS[kind](straight.named_parameters())
    train(straight, optimizer, range(3))
    save_optimizer(tmp_path, optimizer)
    resumed = network(1)
    resumed.load_state_dict(straight.state_dict())
    other = MAKERS[kind](resumed.named_parameters())
    load_optimizer(tmp_path, other)
    train(straight, optimizer, range(3, 6))
    train(resumed, other, range(3, 6))
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_state_goes_by_name_not_by_order_or_group(tmp_path: Path) -> None:
    module = network()
    optimizer = MAKERS["adamw"](module.named_parameters())
    train(module, optimizer, range(2))
    save_optimizer(tmp_path, optimizer)
    named = list(module.named_parameters())
    other = torch.optim.AdamW([{"params": named[2:]}, {"params": named[1::-1]}], lr=0.5)
    load_optimizer(tmp_path, other)
    for _, parameter in named:
        assert torch.equal(other.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.1]


def test_loading_over_a_state_that_is_there(tmp_path: Path) -> None:
    module = network()
    optimizer = MAKERS["adamw"](module.named_parameters())
    train(module, optimizer, range(2))
    save_optimizer(tmp_path, optimizer)
    weight = module[0].weight
    moments, expected = optimizer.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg"].clone()
    train(module, optimizer, range(2, 4))
    assert not torch.equal(moments, expected)
    load_optimizer(tmp_path, optimizer)
    assert optimizer.state[weight]["exp_avg"] is moments and torch.equal(moments, expected), "read in place"
    assert optimizer.state[weight]["step"] == 2


def test_fresh_optimizer_clears_what_was_there(tmp_path: Path) -> None:
    module = network()
    save_optimizer(tmp_path, MAKERS["adamw"](module.named_parameters()))
    optimizer = MAKERS["adamw"](module.named_parameters())
    train(module, optimizer, range(1))
    load_optimizer(tmp_path, optimizer)
    assert not optimizer.state


def test_separate_masters(tmp_path: Path) -> None:
    module = network().to(torch.bfloat16)
    masters = {name: nn.Parameter(p.detach().float() + 1e-4) for name, p in module.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=0.1)
    for master in masters.values():
        master.grad = torch.ones_like(master)
    optimizer.step()
    with pytest.raises(CheckpointError, match=r"4 tensors of the optimizer have no name.*parameters"):
        save_optimizer(tmp_path, optimizer)
    save_optimizer(tmp_path, optimizer, {n: m.data for n, m in masters.items()}, parameters=masters)
    fresh = {name: nn.Parameter(torch.zeros_like(m)) for name, m in masters.items()}
    other = torch.optim.AdamW(fresh.values(), lr=0.1)
    load_optimizer(tmp_path, other, {n: m.data for n, m in fresh.items()}, parameters=fresh)
    for name in masters:
        assert torch.equal(fresh[name], masters[name])
        assert torch.equal(other.state[fresh[name]]["exp_avg_sq"], optimizer.state[masters[name]]["exp_avg_sq"])
    with pytest.raises(CheckpointError, match=r"holds 4 masters that the optimizer lacks, such as '0.bias'"):
        load_optimizer(tmp_path, other, parameters=fresh)


def test_other_parameters_are_refused_before_anything_changes(tmp_path: Path) -> None:
    module = network()
    optimizer = MAKERS["adamw"](module.named_parameters())
    train(module, optimizer, range(2))
    save_optimizer(tmp_path, optimizer)
    wider = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    with pytest.raises(CheckpointError, match=r"'0.weight' was \[4, 3\], in this run it is \[5, 3\]"):
        load_optimizer(tmp_path, MAKERS["adamw"](wider.named_parameters()))
    deeper = nn.Sequential(*network(), nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"lacks 2 of the optimizer's parameters, such as '2.bias'"):
        load_optimizer(tmp_path, MAKERS["adamw"](deeper.named_parameters()))
    fewer = MAKERS["adamw"](list(module.named_parameters())[:2])
    with pytest.raises(CheckpointError, match=r"holds 2 parameters that the optimizer lacks, such as '1.bias'"):
        load_optimizer(tmp_path, fewer)
    with pytest.raises(CheckpointError, match="holds no optimizer state"):
        load_optimizer(tmp_path / "elsewhere", optimizer)
    assert not fewer.state


def test_hyperparameters_come_from_the_run_but_for_the_rate(tmp_path: Path, caplog) -> None:
    module = network()
    save_optimizer(tmp_path, torch.optim.AdamW(module.named_parameters(), lr=0.025, weight_decay=0.5))
    optimizer = torch.optim.AdamW(module.named_parameters(), lr=0.1, weight_decay=0.25)
    load_optimizer(tmp_path, optimizer)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.025, 0.25)
    assert [record.message for record in caplog.records] == [
        "the optimizer's weight_decay was 0.5 when it was saved and is 0.25 in this run"
    ]
