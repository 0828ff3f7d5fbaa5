"""A process group that dies with the process that started it, however that one ends.

The kernel's parent-death signal reaches one process and not its children, and a process stuck in C code can't pass it
on. So the first process of the group stays behind, waits for nothing but that signal, and kills the group.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5  # where the kernel has no such signal


def go_on_in_child(parent: int) -> None:
    """Fork. The child returns; this process, the leader of its group, stays behind as the group's guardian.

    The guardian kills the whole group when ``parent``, or the thread of it that started this process, ends; or else
    ends as the child ends: by the same exit code or signal. It holds open what the child holds, so that who reads the
    end of a channel finds that exit code. Call it before other threads exist.

    parent  the process that started this one
    """
    guardian = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signals = {signal.SIGCHLD, signal.SIGTERM}
    old = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    child = os.fork()
    if child == 0:
        signal_on_parent_death(signal.SIGKILL, guardian)  # a guardian that is killed takes the child along
        signal.pthread_sigmask(signal.SIG_SETMASK, old - signals)
        return
    signal_on_parent_death(signal.SIGTERM, parent)
    while signal.sigwait(signals) == signal.SIGCHLD:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            _end_as(os.waitstatus_to_exitcode(status))
    os.killpg(guardian, signal.SIGKILL)


def signal_on_parent_death(number: signal.Signals, parent: int) -> None:
    """Have this process get a signal when ``parent``, its parent, ends; now, if it has ended."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    else:
        threading.Thread(target=_watch, args=(number, parent), daemon=True).start()
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def _watch(number: signal.Signals, parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), number)


def _end_as(code: int) -> None:
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has written its own
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)
