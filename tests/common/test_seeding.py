import random

import numpy
import pytest
import torch

from verl.common.seeding import derive_seed, seed_everything


def test_seeds_are_the_same_on_every_machine() -> None:
    assert derive_seed(0, "epoch", 3) == 1928327372618178029
    assert derive_seed() == 0x9E3779B97F4A7C15 >> 1


def test_seeds_differ_by_every_part_and_its_place() -> None:
    keys = [
        (),
        (0,),
        (0, 0),
        (1,),
        (-1,),
        (0, 1),
        (1, 0),
        ("a",),
        ("b",),
        ("ab",),
        ("a", "b"),
        ("b", "a"),
        ("",),
        ("", ""),
    ]
    keys += [("a" * n,) for n in range(2, 40)] + [
        (2**40,),
        (2**100,),
        (-(2**100),),
        ("a\0",),
        ("\0",),
        ("a", 0),
        (0, "a"),
    ]
    seeds = {derive_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_neighbouring_seeds_share_no_bits_in_particular() -> None:
    pairs = [derive_seed(7, n) ^ derive_seed(7, n + 1) for n in range(300)]
    changed = sum(bin(pair).count("1") for pair in pairs) / len(pairs)
    assert changed == pytest.approx(31.5, abs=1.5)


@pytest.mark.parametrize("seed", [0, 5, 2**40 + 5])
def test_seed_everything(seed: int) -> None:
    kept = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    draws = []
    for _ in range(2):
        seed_everything(seed)
        draws.append((random.random(), numpy.random.rand(), float(torch.rand(()))))
    assert draws[0] == draws[1]
    random.setstate(kept[0])
    numpy.random.set_state(kept[1])
    torch.set_rng_state(kept[2])
