"""One worker process a device, on this machine.

Commands go through a socket a worker, values through nameless shared memory. Workers are fresh interpreters: "fork" is
unsafe beside threads and CUDA, and multiprocessing's "spawn" would run the user's script again.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from verl.controller.executors.base import WorkerLost
from verl.controller.executors.channel import Channel
from verl.controller.executors.devices import local_devices
from verl.controller.executors.memory import store
from verl.controller.place import Rendezvous
from verl.controller.pool import ResourcePool
from verl.controller.rendezvous import host_store
from verl.controller.results import Store
from verl.controller.worker import Command, Reply

_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from verl.controller.executors.child import main
main(*map(int, sys.argv[2:]))
"""
_LAST_WORDS = 20  # lines
_CLOSE_S = 5.0


class ChannelEndpoint:
    """A worker at the other end of a channel; who started it is not known here."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def run(self, command: Command, timeout_s: float | None) -> Reply:
        try:
            self._channel.send(command, timeout_s)
            reply: Reply = self._channel.receive(timeout_s)
        except TimeoutError:
            self.kill()
            raise WorkerLost(f"gave no answer within {timeout_s:g} s and was ended{self.last_words()}") from None
        except (EOFError, OSError):
            raise WorkerLost(f"{self.how_it_ended()}{self.last_words()}") from None
        return reply

    def shut(self) -> None:
        """Tell the worker that no more commands come."""
        self._channel.shut()

    def kill(self) -> None:
        self.shut()

    def close(self) -> None:
        """Shut the channel and give it back."""
        self.shut()
        self._channel.close()

    def how_it_ended(self) -> str:
        """How the process ended, as far as it is known here."""
        return "is gone: its end of the connection is closed"

    def last_words(self) -> str:
        """The end of what it wrote to its standard error, if that went through here."""
        return ""


class _Process(ChannelEndpoint):
    """A worker process, its standard error and the pipe that it dies with."""

    def __init__(self, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        lifeline_read, self._lifeline = os.pipe()
        fds = (theirs.fileno(), lifeline_read)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(sys.path), *map(str, fds), str(os.getpid())],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        except BaseException:
            ours.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(lifeline_read)
        super().__init__(Channel(ours))
        self._lock = threading.Lock()
        self._is_killed, self._is_open = False, True
        self._words: collections.deque[str] = collections.deque(maxlen=_LAST_WORDS)
        self._listener = threading.Thread(target=_pass_on, args=(self._process.stderr, self._words), daemon=True)
        self._listener.start()

    def kill(self) -> None:
        with self._lock:
            if self._process.returncode is None:  # not waited for yet: the number is still its own
                self._is_killed = not self._has_ended()
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)  # its children too
                self._process.wait()
        super().kill()

    def end(self, until: float) -> None:
        """Give the process until then to end by itself, then kill it, and give everything back."""
        self._linger(until)
        self.kill()
        self._listener.join(timeout=1)
        if self._is_open:
            self._is_open = False
            os.close(self._lifeline)
            self.close()

    def _linger(self, until: float) -> None:
        while self._process.returncode is None and not self._has_ended() and time.monotonic() < until:
            time.sleep(0.005)

    def _has_ended(self) -> bool:
        """Whether it has ended by itself. It stays waited for, so that its process group can still be killed."""
        if sys.platform != "linux":
            return self._process.poll() is not None
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def how_it_ended(self) -> str:
        self._linger(time.monotonic() + _CLOSE_S)
        self.kill()
        code = self._process.returncode
        if self._is_killed:
            return "was ended"
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def last_words(self) -> str:
        self._listener.join(timeout=1)
        words = "\n".join(self._words)
        return f"; its last words:\n{words}" if words else "; it wrote nothing to its standard error"


def _pass_on(stream: IO[bytes], words: collections.deque[str]) -> None:
    """Standard error of a worker to our own, keeping the last lines."""
    with stream:
        for line in stream:
            text = line.decode(errors="replace")
            words.append(text.rstrip("\n"))
            sys.stderr.write(text)


@dataclass(frozen=True)
class _Started:
    endpoints: Sequence[_Process]
    devices: list[str]
    rendezvous: Rendezvous | None


class Processes:
    """Worker processes of this machine. They end with this one, even when it is killed."""

    def __init__(self) -> None:
        self._processes: list[_Process] = []
        self._stores: list[object] = []
        _allow_many_descriptors()

    @staticmethod
    def serve() -> bool:
        return False

    @property
    def store(self) -> Store:
        return store

    def start(self, pool: ResourcePool) -> _Started:
        devices = local_devices(pool, "processes")
        rendezvous = None
        if pool.size > 1:
            hosted, rendezvous = host_store()
            self._stores.append(hosted)
        started = []
        for rank in range(pool.size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(pool.size)}
            started.append(_Process(own))
            self._processes.append(started[-1])
        return _Started(started, devices, rendezvous)

    def close(self) -> None:
        until = time.monotonic() + _CLOSE_S
        for process in self._processes:
            process.shut()
        for process in self._processes:
            process.end(until)
        self._processes.clear()
        self._stores.clear()


def _allow_many_descriptors() -> None:
    """A held result costs one descriptor a rank; the usual soft limit of 1024 is for programs that use select."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
