"""The process that runs a reward: ``python -m verl.rewards.worker CHANNEL LIFELINE PARENT``.

A greeting and then items come in over the inherited socket CHANNEL, results go out over it; the function's own
prints go where the parent's go. The process and its children die when the pipe LIFELINE closes, which is when the
process PARENT ends, however it ends. Imports neither torch nor a reward of its own accord.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from verl.rewards.base import RewardResult, as_result, failed
from verl.rewards.calling import Call, bind, describe

READY, BROKEN, STARTED = b"ready", b"broken", b"started"
_F_SETSIG = 10  # fcntl has no name for it
_PR_SET_PDEATHSIG = 1


def main(channel_fd: int, lifeline_fd: int, parent: int) -> None:
    """Serve until the channel closes."""
    die_with(lifeline_fd, parent)
    os.set_inheritable(channel_fd, False)
    channel = Connection(channel_fd)
    try:
        call = _load(pickle.loads(channel.recv_bytes()))
    except EOFError:
        return
    except BaseException as error:  # user code: a module may even exit
        channel.send_bytes(BROKEN + describe(error).encode())
        return
    channel.send_bytes(READY)
    own = os.getpid()
    while True:
        try:
            data = channel.recv_bytes()
        except (EOFError, OSError):
            return
        result = _score(channel, call, data)
        if os.getpid() != own:  # a child that the function forked came back from it: its parent answers
            os._exit(0)
        channel.send_bytes(pickle.dumps((result.score, dict(result.parts), result.failure, result.detail)))


def die_with(lifeline_fd: int, parent: int) -> None:
    """Have this process group killed when the last writer of the pipe ``lifeline_fd`` is gone.

    On Linux the kernel does it, so that a function stuck in C code dies too.
    """
    os.set_inheritable(lifeline_fd, False)
    if sys.platform == "linux":
        import ctypes
        import fcntl

        fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline_fd, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a forked sibling may hold the pipe open
    else:
        threading.Thread(target=_watch, args=(lifeline_fd,), daemon=True).start()
    if os.getppid() != parent:
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _watch(lifeline_fd: int) -> None:
    os.read(lifeline_fd, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _load(greeting: dict[str, Any]) -> Call:
    """Take over the parent's import path, then load the function, which may need it."""
    sys.path[:] = greeting["sys_path"]
    for name, value in greeting["environment"].items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    source = pickle.loads(greeting["source"])
    return bind(source.load(), pickle.loads(greeting["kwargs"]))


def _score(channel: Connection, call: Call, data: bytes) -> RewardResult:
    try:
        fields = pickle.loads(data)
        channel.send_bytes(STARTED)  # the time limit runs from here: loading may import a row's packages
        return as_result(call(fields))
    except BaseException as error:  # user code: SystemExit, MemoryError and RecursionError are failures of one row
        return failed("error", describe(error))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
