"""A worker makes objects, runs their methods and reports what they raise."""

from __future__ import annotations

import pickle

from tests.controller.roles import Echo, Trouble
from verl.common.errors import ConfigError
from verl.controller.place import Place
from verl.controller.results import Kept
from verl.controller.worker import Create, Invoke, Worker


def test_creates_and_invokes() -> None:
    worker = Worker(Kept)
    made = worker.run(Create("echo", Place(rank=3, world_size=4), Kept((Echo, {"offset": 10}))))
    assert made.result is not None and made.result.load() is None
    reply = worker.run(Invoke("echo", "add", {0: Kept([1, 2]), "more": Kept(5)}))
    assert reply.result is not None and reply.result.load() == [16, 17]


def test_reports_what_is_raised() -> None:
    worker = Worker(Kept)
    assert "no object on rank 0" in worker.run(Create("t", Place(), Kept((Trouble, {"fail_at": 0})))).failure
    worker.run(Create("t", Place(), Kept((Trouble, {}))))
    reply = worker.run(Invoke("t", "raises", {"rank": Kept(0)}))
    assert reply.result is None and "KeyError: 'nothing there'" in reply.failure


def test_says_in_one_line_what_a_constructor_refuses() -> None:
    reply = Worker(Kept).run(Create("t", Place(rank=2, world_size=3), Kept((Trouble, {"refuse_at": 2}))))
    again = pickle.loads(pickle.dumps(reply)).refusal
    assert type(again) is ConfigError and str(again).endswith("Known: twin (t worker, rank 2)")
    assert "UnknownName" in reply.failure


def test_positions_beyond_nine_keep_their_order() -> None:
    class Args:
        def __init__(self, place: Place) -> None: ...

        def all(self, *values: int) -> list[int]:
            return list(values)

    worker = Worker(Kept)
    worker.run(Create("args", Place(), Kept((Args, {}))))
    reply = worker.run(Invoke("args", "all", {i: Kept(i) for i in reversed(range(12))}))
    assert reply.result is not None and reply.result.load() == list(range(12))
