"""Worker processes that score one item at a time under a hard time limit.

Pickled fields come in, futures of results go out. A worker over its limit is killed with all its children and
replaced; one that dies costs only the item that it was working on. Knows nothing of what a reward is.

Workers are started as fresh interpreters: multiprocessing's "spawn" would run the user's script again, and "fork" is
unsafe beside threads and CUDA.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from verl.common.errors import ConfigError, RewardError
from verl.common.waiting import result_of
from verl.rewards.base import RewardResult, failed
from verl.rewards.worker import BROKEN, READY, STARTED

LEAST_LOAD_LIMIT_S = 60.0
"""For imports, of the function's module or of what an item's fields need, where one item's limit is shorter."""


def import_environment() -> dict[str, str]:
    """Variables that make a fresh interpreter find this library where this process does, and nothing before it."""
    return {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "PYTHONSAFEPATH": "1"}


class _Died(Exception):
    """A worker ended by itself. ``args[0]`` says how."""


class _Worker:
    """One process. Made and used by one thread; ``kill`` may come from any.

    load_limit_s  for loading the function, and for loading the fields of an item
    is_usable     False once it has died or run over its time limit
    """

    def __init__(self, greeting: bytes, load_limit_s: float) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "verl.rewards.worker", str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **import_environment()},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._channel = Connection(ours.detach())
        self._greeting, self._load_limit_s = greeting, load_limit_s
        self._lock = threading.Lock()
        self.is_usable = True

    def greet(self) -> frozenset[str]:
        """Have the function loaded; returns the fields that it needs. Raises ConfigError when that fails or takes too
        long."""
        try:
            self._send(self._greeting)
            answer = self._receive(self._load_limit_s)
        except _Died as death:
            raise ConfigError(f"the reward's function can't be loaded: its process {death}") from None
        if answer is None:
            raise ConfigError(
                f"the reward's function wasn't loaded within {self._load_limit_s:g} s: its module waits for something, "
                f"or needs longer. A reward.timeout_s of more than {LEAST_LOAD_LIMIT_S:g} gives it that long"
            )
        if answer.startswith(BROKEN):
            raise ConfigError(f"the reward's function can't be loaded: {answer.removeprefix(BROKEN).decode()}")
        return frozenset(answer.removeprefix(READY).decode().split())

    def begin(self, fields: bytes) -> RewardResult | None:
        """Hand over one item; a result if it can't be begun. Raises _Died when the worker dies before it has begun."""
        self._send(fields)
        answer = self._receive(self._load_limit_s)
        if answer is None:
            return failed("timeout", f"the item's fields weren't loaded within {self._load_limit_s:g} s")
        return None if answer == STARTED else _unpack(answer)

    def finish(self, timeout_s: float) -> RewardResult:
        """The result of the item that was begun."""
        try:
            answer = self._receive(timeout_s)
        except _Died as death:
            return failed("error", f"the reward's process {death}")
        return failed("timeout", f"no score within {timeout_s:g} s") if answer is None else _unpack(answer)

    def kill(self) -> None:
        """End the process and its children, now, and give everything back. May be called twice."""
        with self._lock:
            if self._process.returncode is None:
                try:
                    os.killpg(self._process.pid, signal.SIGKILL)  # before wait, which would free the group's number
                except (ProcessLookupError, PermissionError):
                    self._process.kill()  # it hasn't got as far as its own group
                self._process.wait()

    def close(self) -> None:
        """``kill``, and close the channel; only from the thread that uses it."""
        self.kill()
        self._channel.close()

    def _send(self, data: bytes) -> None:
        try:
            self._channel.send_bytes(data)
        except OSError:
            raise _Died(self._how_it_ended()) from None

    def _receive(self, limit_s: float) -> bytes | None:
        """The next message, or None after ``limit_s`` seconds without one."""
        try:
            if self._channel.poll(limit_s):
                return self._channel.recv_bytes()
        except (EOFError, OSError):
            raise _Died(self._how_it_ended()) from None
        self.is_usable = False
        return None

    def _how_it_ended(self) -> str:
        self.is_usable = False
        self.kill()  # its children; it has its own exit code by now
        code = self._process.returncode
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


class _Shared:
    """What the pool and its threads share; it doesn't refer to the pool, so that an unused pool is collected."""

    def __init__(self, greeting: bytes, timeout_s: float) -> None:
        self.greeting, self.timeout_s = greeting, timeout_s
        self.tasks: queue.SimpleQueue[tuple[bytes, Future[RewardResult]] | None] = queue.SimpleQueue()
        self.ready: Future[frozenset[str]] = Future()
        self.lock = threading.Lock()
        self.workers: set[_Worker] = set()
        self.is_closed = False

    def start_worker(self) -> _Worker:
        """A worker that has loaded the function."""
        worker = _Worker(self.greeting, max(self.timeout_s, LEAST_LOAD_LIMIT_S))
        with self.lock:
            self.workers.add(worker)
            is_late = self.is_closed
        try:
            if is_late:
                raise RewardError("the reward runner was closed")
            needs = worker.greet()
        except BaseException:
            self.drop(worker)
            raise
        _settle(self.ready, needs)
        return worker

    def drop(self, worker: _Worker) -> None:
        """End a worker for good."""
        worker.close()
        with self.lock:
            self.workers.discard(worker)

    def close(self) -> None:
        """Kill every worker and end every thread; what isn't scored yet is cancelled."""
        with self.lock:
            self.is_closed = True
            workers = list(self.workers)
        for worker in workers:
            worker.kill()
        self.tasks.put(None)


class WorkerPool:
    """``workers`` processes, started at the first item, each served by a thread of its own.

    source     pickled; an object whose ``load()`` gives the function, in the worker
    timeout_s  seconds for one item, from when its fields are loaded
    """

    def __init__(self, source: bytes, kwargs: Mapping[str, Any], workers: int, timeout_s: float) -> None:
        greeting = {
            "sys_path": list(sys.path),
            "environment": {name: os.environ.get(name) for name in import_environment()},
            "source": source,
            "kwargs": cloudpickle.dumps(dict(kwargs)),
        }
        self._shared = _Shared(pickle.dumps(greeting), timeout_s)
        self._threads = [
            threading.Thread(target=_serve, args=(self._shared,), name=f"verl-reward-{i}", daemon=True)
            for i in range(workers)
        ]
        self._start_lock = threading.Lock()
        self._is_started = False
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, self._shared.close)

    def start(self) -> frozenset[str]:
        """Start the workers and wait for the first; returns the fields that the function needs.

        Raises ConfigError when it can't be loaded.
        """
        self._start_threads()
        return result_of(self._shared.ready)

    def submit(self, fields: bytes) -> Future[RewardResult]:
        """Queue one item: pickled arguments by name."""
        self._start_threads()
        future: Future[RewardResult] = Future()
        self._shared.tasks.put((fields, future))
        return future

    def close(self) -> None:
        """Kill the workers. Items that aren't scored yet are cancelled."""
        self._finalizer()
        if self._is_started:
            for thread in self._threads:
                thread.join()

    def _start_threads(self) -> None:
        if not self._finalizer.alive:
            raise RewardError("this reward runner is closed: make a new one")
        if os.getpid() != self._pid:
            raise RewardError("this reward runner belongs to the process that made it: make one after forking")
        with self._start_lock:
            if not self._is_started:
                self._is_started = True
                for thread in self._threads:
                    thread.start()


def _serve(shared: _Shared) -> None:
    """A thread's life: one worker, replaced whenever it ends, and one item after the other."""
    worker: _Worker | None = None
    try:
        worker = shared.start_worker()
    except Exception as error:
        _settle(shared.ready, error)
    while (task := shared.tasks.get()) is not None:
        fields, future = task
        if shared.is_closed or not future.set_running_or_notify_cancel():
            future.cancel()
            continue
        try:
            worker, result = _score(shared, worker, fields)
        except Exception as error:
            worker = None
            future.set_exception(error)
        else:
            future.set_result(result)
    shared.tasks.put(None)  # for the next thread
    if worker is not None:
        shared.drop(worker)


def _score(shared: _Shared, worker: _Worker | None, fields: bytes) -> tuple[_Worker | None, RewardResult]:
    """One item's result, and the worker if it lives on. An item that wasn't begun is tried on one more worker."""
    for _ in range(2):
        worker = worker or shared.start_worker()
        try:
            result = worker.begin(fields) or worker.finish(shared.timeout_s)
        except _Died:
            shared.drop(worker)
            worker = None
            continue
        if worker.is_usable:
            return worker, result
        shared.drop(worker)
        return None, result
    return None, failed("error", "two workers ended before they began this item")


def _settle(ready: Future[frozenset[str]], found: frozenset[str] | Exception) -> None:
    """Let the first thread decide whether the function loads."""
    try:
        ready.set_exception(found) if isinstance(found, Exception) else ready.set_result(found)
    except InvalidStateError:  # another thread was first
        return


def _unpack(answer: bytes) -> RewardResult:
    score, parts, failure, detail = pickle.loads(answer)
    return RewardResult(score=score, parts=parts, failure=failure, detail=detail)
