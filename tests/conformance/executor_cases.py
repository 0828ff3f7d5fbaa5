"""What every executor must do, as functions of a controller, so that a program under torchrun can run them too.

``python -m tests.conformance.executor_cases EXECUTOR FOLDER CASE...`` runs cases one after the other and writes what
each raised, or nothing, to a file of its name in FOLDER.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.controller.roles import Echo, Tensors, Trouble
from verl.batch import Batch
from verl.common.errors import ConfigError, MissingField, ShapeError, WorkerError
from verl.controller import Controller, Layout, ResourcePool, run, whole

TIMEOUT_S = 60.0
"""For any one call: a case that hangs is a failure."""
OPTIONS: dict[str, dict[str, Any]] = {"ray": {"cpus_per_worker": 0.25}}
GENERAL: dict[str, Callable[[Controller, int], None]] = {}
SEVERAL: dict[str, Callable[[Controller, int], None]] = {}
FATAL: dict[str, tuple[Callable[[Controller, int], None], dict[str, float]]] = {}


def general(case: Callable[[Controller, int], None]) -> Callable[[Controller, int], None]:
    """A case for every executor; its second argument is the size of its larger pools."""
    GENERAL[case.__name__] = case
    return case


def several(case: Callable[[Controller, int], None]) -> Callable[[Controller, int], None]:
    """A case for executors of several workers."""
    SEVERAL[case.__name__] = case
    return case


def fatal(**options: float) -> Callable[[Callable[[Controller, int], None]], None]:
    """A case after which the controller can't go on."""
    return lambda case: FATAL.update({case.__name__: (case, options)})


def pool(size: int) -> ResourcePool:
    return ResourcePool(size, kind="cpu")


@general
def each_rule(controller: Controller, size: int) -> None:
    echo = controller.group("echo", Echo, pool(size), offset=100)
    assert echo.to_everyone("x").get(TIMEOUT_S) == (0, "x")
    assert echo.of_all("x").get(TIMEOUT_S) == [(rank, "x") for rank in range(size)]
    assert echo.to_first("x").get(TIMEOUT_S) == (0, "x")
    assert echo.logged().get(TIMEOUT_S) == [["x"]] + [[]] * (size - 1)
    assert echo.add([1, 2, 3], more=5).get(TIMEOUT_S) == [106, 107, 108]
    assert sum(part[1] for part in echo.total([1, 2, 3]).get(TIMEOUT_S)) == 6
    assert echo.stage([1, 2]).get(TIMEOUT_S) == [(0, 1), (0, 2)]


@several
def layouts(controller: Controller, size: int) -> None:
    place = pool(2)
    pipeline = controller.group("pipeline", Echo, place, Layout(pp_size=2))
    assert pipeline.stage([1, 2]).get(TIMEOUT_S) == [(1, 1), (1, 2)]
    assert pipeline.first_stage([1, 2]).get(TIMEOUT_S) == [(0, 1), (0, 2)]
    tensor = controller.group("tensor", Echo, place, Layout(tp_size=2))
    assert tensor.add([1, 2]).get(TIMEOUT_S) == [1, 2]
    assert tensor.logged().get(TIMEOUT_S) == [[[1, 2]], [[1, 2]]]
    with pytest.raises(ConfigError, match=r"tp_size=2 times pp_size=2.*multiple of 4"):
        controller.group("both", Echo, place, Layout(tp_size=2, pp_size=2))


@general
def rows_of_any_number(controller: Controller, size: int) -> None:
    echo = controller.group("echo", Echo, pool(size))
    for count in (0, 1, 2, 7):
        assert echo.add(list(range(count))).get(TIMEOUT_S) == list(range(count))
    lengths = [[len(rows) for rows in log] for log in echo.logged().get(TIMEOUT_S)]
    assert (
        lengths
        == {1: [[0, 1, 2, 7]], 2: [[0, 1, 1, 4], [0, 0, 1, 3]], 3: [[0, 1, 1, 3], [0, 0, 1, 2], [0, 0, 0, 2]]}[size]
    )


@general
def arguments_that_are_not_cut(controller: Controller, size: int) -> None:
    echo = controller.group("echo", Echo, pool(size))
    parts = echo.total([1, 2, 3], keep=whole(["a", "b"])).get(TIMEOUT_S)
    assert [part[2] for part in parts] == [["a", "b"]] * size
    with pytest.raises(ShapeError, match=r"0: 3, 'keep': 2.*whole"):
        echo.total([1, 2, 3], keep=["a", "b"]).get(TIMEOUT_S)


@general
def calls_run_in_the_order_in_which_they_were_made(controller: Controller, size: int) -> None:
    slow = controller.group("slow", Echo, pool(size))
    log = controller.group("log", Echo, pool(1))
    late = slow.sleep(0.3)
    log.write(late)
    for i in range(20):
        log.write(i)
    assert log.logged().get(TIMEOUT_S) == [[list(range(size)), *range(20)]]


@general
def a_handle_comes_at_once(controller: Controller, size: int) -> None:
    echo = controller.group("echo", Echo, pool(size))
    handle = echo.sleep(1.5)
    assert not handle.is_done
    with pytest.raises(TimeoutError, match=r"echo\.sleep isn't done after 0\.1 s"):
        handle.get(0.1)
    assert handle.get(TIMEOUT_S) == list(range(size))


@general
def from_producer_to_consumer(controller: Controller, size: int) -> None:
    producer = controller.group("producer", Tensors, pool(min(size, 2)))
    consumer = controller.group("consumer", Tensors, pool(1))
    batch = producer.responses(list(range(6)))
    assert sum(consumer.token_sum(batch).get(TIMEOUT_S)) == sum(i * (i + 1) for i in range(6))
    both = consumer.with_log_probs(batch)
    assert producer.token_sum(both).wait(TIMEOUT_S).is_done
    got = both.get(TIMEOUT_S)
    assert isinstance(got, Batch) and [row["prompt"] for row in got.rows] == [f"p{i}" for i in range(6)]
    assert got.padded("old_log_probs").tolist() == [[-i if j <= i else 0 for j in range(6)] for i in range(6)]
    assert "old_log_probs" not in batch.get(TIMEOUT_S)


@general
def some_columns_of_a_batch(controller: Controller, size: int) -> None:
    batch = controller.group("producer", Tensors, pool(min(size, 2))).responses([3, 1, 2, 0])
    got = batch.fetch("scores", "response_ids", timeout=TIMEOUT_S)
    assert torch.equal(got["scores"], torch.tensor([0.3, 0.1, 0.2, 0.0]))
    assert got.lengths("response_ids").tolist() == [4, 2, 3, 1] and got.rows == [{}] * 4
    with pytest.raises(MissingField, match="'valus' isn't in the result"):
        batch.fetch("valus", timeout=TIMEOUT_S)


@general
def megabytes(controller: Controller, size: int) -> None:
    producer = controller.group("producer", Tensors, pool(min(size, 2)))
    consumer = controller.group("consumer", Tensors, pool(1))
    rows = producer.noise(torch.zeros(4), width=1_000_000)
    assert consumer.shapes(rows).get(TIMEOUT_S) == [(4, 1_000_000)]
    assert float(rows.get(TIMEOUT_S)[0, -1]) == 999_999


@general
def a_worker_that_raises_fails_its_call(controller: Controller, size: int) -> None:
    trouble = controller.group("trouble", Trouble, pool(size))
    failed = trouble.raises(rank=size - 1)
    with pytest.raises(WorkerError) as caught:
        failed.get(TIMEOUT_S)
    error = caught.value
    assert (error.role, error.rank) == ("trouble", size - 1)
    assert "raises raised" in str(error) and "KeyError: 'nothing there'" in str(error) and "roles.py" in str(error)
    with pytest.raises(WorkerError, match="KeyError"):
        trouble.raises(failed).get(TIMEOUT_S)
    assert trouble.fine().get(TIMEOUT_S) == list(range(size))


@general
def a_constructor_that_raises(controller: Controller, size: int) -> None:
    with pytest.raises(WorkerError, match=rf"(?s)trouble worker, rank {size - 1}: .*no object on rank"):
        controller.group("trouble", Trouble, pool(size), fail_at=size - 1)


@general
def a_constructor_that_refuses_what_it_is_given(controller: Controller, size: int) -> None:
    with pytest.raises(ConfigError) as caught:
        controller.group("trouble", Trouble, pool(size), refuse_at=size - 1)
    assert str(caught.value).startswith("unknown sort 'twig'; did you mean 'twin'? Known: twin (trouble worker, rank ")
    assert "Traceback" not in str(caught.value)


@several
def the_first_error_ends_the_wait(controller: Controller, size: int) -> None:
    trouble = controller.group("trouble", Trouble, pool(size))
    start = time.monotonic()
    with pytest.raises(WorkerError, match=f"rank {size - 1}"):
        trouble.raises(rank=size - 1, others_sleep_s=4).get(TIMEOUT_S)
    assert time.monotonic() - start < 3


@general
def roles_of_one_pool_share_its_workers(controller: Controller, size: int) -> None:
    shared = pool(size)
    first, second = (controller.group(name, Echo, shared) for name in ("first", "second"))
    seen = first.seen().get(TIMEOUT_S)
    assert seen == second.seen().get(TIMEOUT_S) and len({pid for pid, _ in seen}) == size
    first.sleep(0.2)
    second.write("x")
    assert [place.rank for _, place in seen] == list(range(size))
    with pytest.raises(ConfigError, match="a group 'first' already"):
        controller.group("first", Echo, shared)


@several
def pools_have_workers_of_their_own(controller: Controller, size: int) -> None:
    first = controller.group("first", Echo, ResourcePool([0, 1], kind="cpu"))
    second = controller.group("second", Echo, ResourcePool([2], kind="cpu"))
    pids = [pid for group in (first, second) for pid, _ in group.seen().get(TIMEOUT_S)]
    assert len(set(pids)) == 3
    start = time.monotonic()
    for handle in [first.sleep(2.0), second.sleep(2.0)]:
        handle.get(TIMEOUT_S)
    assert time.monotonic() - start < 3.5


@general
def a_sum_over_ranks_is_the_sum_of_the_rows(controller: Controller, size: int) -> None:
    ranks = min(size, 2)
    sums = controller.group("sums", Tensors, pool(ranks), meet=True).all_sum(torch.arange(7.0))
    assert sums.get(TIMEOUT_S) == [21.0] * ranks


@general
def what_cannot_be(controller: Controller, size: int) -> None:
    echo = controller.group("echo", Echo, pool(size))
    with pytest.raises(AttributeError, match="'echo' offers no method 'to_everyon'; did you mean 'to_everyone'"):
        echo.to_everyon()
    with pytest.raises(TypeError, match="can't be inside another argument"):
        echo.of_all([echo.sleep(0)])
    with pytest.raises(ConfigError, match="offers no method: mark those"):
        controller.group("int", int, pool(size))


@fatal()
def a_worker_that_is_killed(controller: Controller, size: int) -> None:
    other = controller.group("other", Echo, pool(1))
    trouble = controller.group("trouble", Trouble, pool(2))
    waiting = trouble.dies(rank=1, others_sleep_s=600)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"trouble worker, rank 1: ") as caught:
        waiting.get(TIMEOUT_S)
    assert time.monotonic() - start < 15 and caught.value.rank == 1
    if os.environ["CASE_EXECUTOR"] == "processes":
        assert "died of SIGKILL; its last words:\nlast words of the worker (during dies)" in str(caught.value)
    with pytest.raises(WorkerError, match="rank 1"):
        other.seen().get(TIMEOUT_S)


@fatal()
def a_worker_that_raises_while_others_wait_for_it(controller: Controller, size: int) -> None:
    trouble = controller.group("trouble", Trouble, pool(2))
    start = time.monotonic()
    failed, queued = trouble.raises_among_others(rank=1), trouble.fine()
    for handle in (failed, queued):
        with pytest.raises(WorkerError, match=r"(?s)trouble worker, rank 1: raises_among_others raised.*KeyError"):
            handle.get(TIMEOUT_S)
    with pytest.raises(WorkerError, match="rank 1"):
        trouble.fine()
    assert time.monotonic() - start < 15


@fatal(call_timeout_s=1.0)
def a_worker_that_hangs(controller: Controller, size: int) -> None:
    trouble = controller.group("trouble", Trouble, pool(size))
    start = time.monotonic()
    with pytest.raises(WorkerError, match=rf"trouble worker, rank {size - 1}: gave no answer within 1 s"):
        trouble.hangs(rank=size - 1).get(TIMEOUT_S)
    assert time.monotonic() - start < 15


@fatal()
def a_worker_that_leaves(controller: Controller, size: int) -> None:
    with pytest.raises(WorkerError, match="trouble worker, rank"):
        controller.group("trouble", Trouble, pool(size)).leaves(3).get(TIMEOUT_S)


@fatal()
def closing_ends_what_runs(controller: Controller, size: int) -> None:
    echo = controller.group("echo", Echo, pool(size))
    running, queued = echo.sleep(2 if size == 1 else 600), echo.add([1])
    time.sleep(0.3)
    start = time.monotonic()
    controller.close()
    assert time.monotonic() - start < 15
    for handle in (running, queued):
        with pytest.raises(Exception, match="was closed before this call was done"):
            handle.get(TIMEOUT_S)
    with pytest.raises(Exception, match="was closed"):
        echo.add([1])
    controller.close()


def run_case(executor: str, name: str, size: int) -> None:
    """One case on a controller of its own. In torchrun's other ranks: serve it."""
    case, options = FATAL[name] if name in FATAL else ({**GENERAL, **SEVERAL}[name], {})
    os.environ["CASE_EXECUTOR"] = executor
    run(lambda controller: case(controller, size), executor, **OPTIONS.get(executor, {}), **options)


def main(executor: str, folder: str, *names: str) -> None:
    size = int(os.environ.get("WORLD_SIZE", 3))
    for name in names:
        failure = ""
        try:
            run_case(executor, name, size)
        except BaseException:
            failure = traceback.format_exc()
        if os.environ.get("RANK", "0") == "0":
            (Path(folder) / name).write_text(failure, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
