"""The single controller: one program that calls worker groups and holds handles on what they return.

A thread stands for each worker and has the calls to it carried out in the order in which the program made them, each
when its arguments are there. Nothing here depends on the size of what passes between workers.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from types import TracebackType
from typing import Any, TypeVar

from verl.common.errors import ConfigError, VerlError, WorkerError
from verl.controller.dispatch import Argument, Rule, Whole, broadcast, rules_of
from verl.controller.executors import EXECUTORS
from verl.controller.executors.base import Endpoint, Executor, WorkerLost, Workers
from verl.controller.group import WorkerGroup
from verl.controller.handle import Handle
from verl.controller.place import Grid, Layout
from verl.controller.pool import ResourcePool
from verl.controller.results import Result
from verl.controller.worker import Command, Create, Invoke

T = TypeVar("T")
log = logging.getLogger(__name__)
DATA_PARALLEL = Layout()
_CAUSE_S = 1.0
_Plan = Callable[[], Sequence[Command | None]]


def run(program: Callable[[Controller], T], executor: str = "inprocess", **options: Any) -> T | None:
    """``program(controller)`` with a controller that is closed afterwards; options as for ``Controller``.

    Under the executor "torchrun" every process calls this: rank 0 runs the program, the others serve it and get None.
    """
    if serve(executor):
        return None
    with Controller(executor, **options) as controller:
        return program(controller)


def serve(executor: str) -> bool:
    """In a process that the executor's controller has as a worker: be one until that controller is closed, then True.

    False at once in the controller's own process.
    """
    served: bool = EXECUTORS.load(executor).serve()
    return served


class Controller:
    """Worker groups on one executor.

    executor         "inprocess", "processes", "torchrun" or "ray"
    call_timeout_s   a call that runs longer on any worker ends the run; None: no limit
    start_timeout_s  the same for starting a worker and making a role's object
    options          of the executor

    A worker that raises fails its call. One that dies or hangs ends all of them: every open handle raises WorkerError.
    So does one of several that raises in a method whose rule is ``joint``.
    """

    def __init__(
        self,
        executor: str = "inprocess",
        *,
        call_timeout_s: float | None = None,
        start_timeout_s: float = 600,
        **options: Any,
    ) -> None:
        self._executor: Executor = EXECUTORS.load(executor)(**options)
        self._call_timeout_s, self._start_timeout_s = call_timeout_s, start_timeout_s
        self._pools: dict[ResourcePool, Workers] = {}
        self._lanes: dict[Endpoint, _Lane] = {}
        self._names: set[str] = set()
        self._lock = threading.Lock()
        self._open_calls: set[_Call] = set()
        self._end: VerlError | None = None

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._finish(_closed())  # before the workers end, or that were an error of theirs
            self._kill()  # what runs is of no use any more
        self.close()

    def group(
        self, name: str, role: type, pool: ResourcePool, layout: Layout = DATA_PARALLEL, /, **kwargs: Any
    ) -> WorkerGroup:
        """One object ``role(place=..., **kwargs)`` on each device of the pool, ready to be called.

        name    of the role, for errors; one group of a controller has it
        role    a class whose methods are marked with ``dispatch``; a kwarg that is a handle is loaded by the workers
        layout  ranks that share one copy of the role
        Raises ConfigError for sizes that don't fit; when a constructor fails WorkerError, or what it said where that is
        a VerlError, as one of the kinds that ``plain`` knows.
        """
        rules = rules_of(role)
        if name in self._names:
            raise ConfigError(f"name: this controller has a group {name!r} already; give each role a name of its own")
        grid = layout.on(pool.size)
        workers = self._workers(pool)
        places = [
            grid.place(
                rank,
                node=pool.node_of(rank),
                local_rank=pool.local_rank(rank),
                device=workers.devices[rank],
                rendezvous=workers.rendezvous,
            )
            for rank in range(pool.size)
        ]
        recipe = self._executor.store((role, kwargs))
        creation = self._submit(
            name,
            "__init__",
            workers,
            lambda: [Create(name, place, recipe) for place in places],
            lambda results: broadcast.join(results, grid),
            self._start_timeout_s,
        )
        creation.wait()
        self._names.add(name)
        return WorkerGroup(name, rules, grid, lambda *call: self._call(name, grid, workers, *call))

    def close(self) -> None:
        """End every worker. Handles that aren't done raise; what was fetched stays. May be called twice."""
        is_busy = self._finish(_closed())
        if is_busy:
            self._kill()
        self._executor.close()
        for lane in self._lanes.values():
            lane.close()

    def _workers(self, pool: ResourcePool) -> Workers:
        if self._end is not None:
            raise self._end
        if pool not in self._pools:
            workers = self._executor.start(pool)
            self._pools[pool] = workers
            for endpoint in workers.endpoints:
                self._lanes.setdefault(endpoint, _Lane(endpoint))
        return self._pools[pool]

    def _call(
        self, name: str, grid: Grid, workers: Workers, method: str, rule: Rule, arguments: dict[str | int, Any]
    ) -> Handle:
        here = {key: self._argument(value) for key, value in arguments.items()}

        def plan() -> list[Command | None]:
            ready = {
                key: Argument(value.result(), is_whole) if isinstance(value, Handle) else Argument(value, is_whole)
                for key, (value, is_whole) in here.items()
            }
            cuts = rule.cut(ready, grid)
            return [None if cut is None else Invoke(name, method, cut) for cut in cuts]

        def join(results: Sequence[Result | None]) -> Result:
            return rule.join(results, grid)

        return self._submit(name, method, workers, plan, join, self._call_timeout_s, is_joint=rule.is_joint)

    def _argument(self, value: Any) -> tuple[Handle | Result, bool]:
        """What stands for an argument, taken as it is now: the caller may change its own afterwards."""
        is_whole = isinstance(value, Whole)
        value = value.value if isinstance(value, Whole) else value
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        for item in inside:
            if isinstance(item, Handle):
                raise item.inside_error()
        return value if isinstance(value, Handle) else self._executor.store(value), is_whole

    def _submit(
        self,
        name: str,
        method: str,
        workers: Workers,
        plan: _Plan,
        join: Callable[[Sequence[Result | None]], Result],
        timeout_s: float | None,
        *,
        is_joint: bool = False,
    ) -> Handle:
        num_ranks = len(workers.endpoints)
        call = _Call(self, name, method, plan, join, num_ranks, timeout_s, is_joint=is_joint and num_ranks > 1)
        with self._lock:
            if self._end is not None:
                raise self._end
            self._open_calls.add(call)
            for rank, endpoint in enumerate(workers.endpoints):
                self._lanes[endpoint].put(call, rank)
        return Handle(f"{name}.{method}", call.future)

    def ended(self, call: _Call) -> None:
        """A call has its result or its error."""
        with self._lock:
            self._open_calls.discard(call)

    def lost(self, error: VerlError) -> None:
        """A worker is gone, or others wait for what it won't do: everything ends, with the first such error."""
        follows = logging.INFO if isinstance(self._end, WorkerError) else logging.DEBUG  # the program ended them
        # at once: a launcher may end this process before the program gets to see it
        log.log(logging.ERROR if self._end is None else follows, "%s", error)
        self._finish(error)
        self._kill()

    def _finish(self, end: VerlError) -> bool:
        """No calls from now on; open ones raise ``end``. Whether there were any."""
        with self._lock:
            self._end = self._end or end
            calls = list(self._open_calls)
        for call in calls:
            call.fail(self._end)
        return bool(calls)

    def _kill(self) -> None:
        for endpoint in list(self._lanes):
            endpoint.kill()


def _closed() -> VerlError:
    return VerlError("the controller was closed before this call was done")


class _Call:
    """One method on the ranks of a group. Each rank's lane runs it; the last one puts the results together."""

    def __init__(
        self,
        controller: Controller,
        role: str,
        method: str,
        plan: _Plan,
        join: Callable[[Sequence[Result | None]], Result],
        num_ranks: int,
        timeout_s: float | None,
        *,
        is_joint: bool,
    ) -> None:
        self.future: Future[Result] = Future()
        self._controller, self._role, self._method, self._timeout_s = controller, role, method, timeout_s
        self._is_joint = is_joint
        self._lock = threading.Lock()
        self._plan: _Plan | None = plan
        self._join = join
        self._commands: Sequence[Command | None] = ()
        self._results: list[Result | None] = [None] * num_ranks
        self._left = num_ranks

    def run(self, rank: int, endpoint: Endpoint) -> None:
        """Have this rank's part carried out. Called on the rank's lane; raises nothing."""
        try:
            command = self._command(rank)
            reply = None if command is None else endpoint.run(command, self._timeout_s)
        except WorkerLost as loss:
            self._controller.lost(WorkerError(self._role, rank, f"{loss.args[0]} (during {self._method})"))
            return
        except Exception as failed:  # an argument whose call failed, or one that can't be cut
            self.fail(failed)
            return
        if reply is not None and reply.result is None:
            error = reply.refusal or WorkerError(self._role, rank, f"{self._method} raised\n{reply.failure}")
            if self._is_joint:
                self._wait_for_a_cause()
                self._controller.lost(error)
            else:
                self.fail(error)
            return
        self._arrived(rank, reply.result if reply is not None else None)

    def fail(self, error: Exception) -> None:
        """End the call, unless it has ended."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)
        self._controller.ended(self)

    def _wait_for_a_cause(self) -> None:
        """A rank that dies breaks the connections of the others, which raise: its own end is to be told."""
        concurrent.futures.wait([self.future], timeout=_CAUSE_S)

    def _command(self, rank: int) -> Command | None:
        with self._lock:  # the first rank waits for the arguments and cuts them for all
            if self.future.done():  # with an error: the ranks that haven't begun don't
                return None
            if self._plan is not None:
                self._commands, self._plan = self._plan(), None
            return self._commands[rank]

    def _arrived(self, rank: int, result: Result | None) -> None:
        with self._lock:
            self._results[rank] = result
            self._left -= 1
            if self._left or self.future.done():
                return
        try:
            joined = self._join(self._results)
        except Exception as error:  # a rule's own code
            self.fail(error)
            return
        with contextlib.suppress(InvalidStateError):
            self.future.set_result(joined)
        self._controller.ended(self)


class _Lane:
    """The calls to one worker, in the order in which they were made, on a thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._queue: queue.SimpleQueue[tuple[_Call, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_drive, args=(self._queue, endpoint), name="verl-lane", daemon=True)
        self._thread.start()

    def put(self, call: _Call, rank: int) -> None:
        """Queue this worker's part of a call."""
        self._queue.put((call, rank))

    def close(self) -> None:
        """End the thread; its worker is gone by now."""
        self._queue.put(None)
        self._thread.join(timeout=5)


def _drive(calls: queue.SimpleQueue[tuple[_Call, int] | None], endpoint: Endpoint) -> None:
    while (task := calls.get()) is not None:
        call, rank = task
        call.run(rank, endpoint)
        del task, call  # not held while waiting for the next
