"""Ranks that meet at a store sum what they bring."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from verl.controller.place import Place
from verl.controller.rendezvous import host_store, join, leave


def test_two_stores_have_ports_of_their_own() -> None:
    (first, a), (second, b) = host_store(), host_store()
    assert a.port != b.port and {a.port, b.port} == {first.port, second.port}


def test_one_worker_needs_no_port() -> None:
    join(Place())
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [1, 1]
    join(Place())
    leave()
    assert not dist.is_initialized()
    leave()


def test_two_ranks_meet() -> None:
    kept, meeting = host_store()

    def total(rank: int) -> float:
        dist.destroy_process_group()
        join(Place(rank=rank, world_size=2, rendezvous=meeting))
        number = torch.tensor(float(rank + 1))
        dist.all_reduce(number)
        return float(number)

    assert run_ranks(2, total) == [3.0, 3.0] and kept.port == meeting.port
