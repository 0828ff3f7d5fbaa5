import pickle
import sys
import threading
from types import ModuleType

import torch

from verl.rewards.shipping import Given, ship


def named(response: str) -> int:
    return len(response)


def test_functions_travel() -> None:
    for function in (named, lambda response: len(response)):
        shipped = ship(Given(function))
        assert isinstance(shipped, bytes)
        assert pickle.loads(shipped).load()("abc") == 3
    assert b"named" in ship(Given(named))  # type: ignore[operator]  # by name, not by value


def test_what_must_stay_says_why() -> None:
    model, lock = torch.nn.Linear(1, 1), threading.Lock()
    assert ship(Given(lambda response: model)) == "it holds a model (Linear)"
    assert "lock" in ship(Given(lambda response: lock))  # type: ignore[operator]
    meta = torch.ones(1, device="meta")
    assert ship(Given(lambda response: meta)) == "it holds a tensor on meta"


def test_functions_of_modules_that_no_path_finds_travel_by_value() -> None:
    module = ModuleType("made_by_hand")
    exec("SCALE = 2\ndef f(response): return SCALE * len(response)", module.__dict__)
    sys.modules[module.__name__] = module
    try:
        shipped = ship(Given(module.f))
    finally:
        del sys.modules[module.__name__]
    assert isinstance(shipped, bytes)
    assert pickle.loads(shipped).load()("abc") == 6
