"""A worker that is a thread of this process."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from concurrent.futures import Future

from verl.controller.executors.base import WorkerLost
from verl.controller.results import Store
from verl.controller.worker import Command, Reply, Worker


class ThreadEndpoint:
    """A worker on a thread of its own. A thread can't be ended from outside: one that hangs is left behind."""

    def __init__(self, store: Store) -> None:
        self._tasks: queue.SimpleQueue[tuple[Command, Future[Reply]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: Future[Reply] | None = None
        self._lost = ""
        self._thread = threading.Thread(target=_serve, args=(self._tasks, store), name="verl-worker", daemon=True)
        self._thread.start()

    def run(self, command: Command, timeout_s: float | None) -> Reply:
        reply: Future[Reply] = Future()
        with self._lock:
            if self._lost:
                raise WorkerLost(self._lost)
            self._running = reply
        self._tasks.put((command, reply))
        try:
            return reply.result(timeout_s)
        except concurrent.futures.TimeoutError:
            lost = f"gave no answer within {timeout_s:g} s; its thread can't be ended and goes on"
        except BaseException as error:  # set by whoever ended the thread: kill, or a role that called sys.exit
            lost = f"ended by {type(error).__name__}: {error}"
        self._lost = lost
        raise WorkerLost(lost)

    def kill(self) -> None:
        with self._lock:
            self._lost = self._lost or "was ended"
            running = self._running
        if running is not None:
            _settle(running, WorkerLost(self._lost))
        self._tasks.put(None)

    def close(self) -> None:
        """Let the thread end after what it does now; wait for that a moment."""
        self._lost = self._lost or "was closed"
        self._tasks.put(None)
        self._thread.join(timeout=1)


def _serve(tasks: queue.SimpleQueue[tuple[Command, Future[Reply]] | None], store: Store) -> None:
    worker = Worker(store)
    while (task := tasks.get()) is not None:
        command, reply = task
        del task
        try:
            _settle(reply, worker.run(command))
        except BaseException as error:  # a role that leaves: SystemExit
            _settle(reply, error)
            return
        del command, reply  # what they hold is given back now, not with the next command


def _settle(reply: Future[Reply], outcome: Reply | BaseException) -> None:
    try:
        if isinstance(outcome, BaseException):
            reply.set_exception(outcome)
        else:
            reply.set_result(outcome)
    except concurrent.futures.InvalidStateError:  # the other side was first
        return
