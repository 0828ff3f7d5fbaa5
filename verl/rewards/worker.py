"""The process that runs a reward: ``python -m verl.rewards.worker CHANNEL PARENT``.

A greeting and then items come in over the inherited socket CHANNEL, results go out over it; the function's own
prints go where the parent's go. The process and its children die when the process PARENT ends, however it ends.
Imports neither torch nor a reward of its own accord.
"""

from __future__ import annotations

import os
import pickle
import sys
from multiprocessing.connection import Connection
from typing import Any

from verl.common.errors import VerlError
from verl.common.guardian import go_on_in_child
from verl.rewards.base import RewardResult, as_result, failed
from verl.rewards.calling import Bound, Call, bind, describe

READY, BROKEN, STARTED = b"ready", b"broken", b"started"


def main(channel_fd: int, parent: int) -> None:
    """Serve until the channel closes."""
    go_on_in_child(parent)
    os.set_inheritable(channel_fd, False)
    channel = Connection(channel_fd)
    try:
        call = _load(pickle.loads(channel.recv_bytes()))
    except EOFError:
        return
    except VerlError as error:
        channel.send_bytes(BROKEN + str(error).encode())
        return
    except BaseException as error:  # user code: a module may even exit
        channel.send_bytes(BROKEN + describe(error).encode())
        return
    channel.send_bytes(READY + " ".join(call.needs).encode())
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


def _load(greeting: dict[str, Any]) -> Bound:
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
    main(*map(int, sys.argv[1:3]))
