"""A process that ends with the one that started it, however that ends and whatever this one is doing."""

from __future__ import annotations

import os
import signal
import sys
import threading

_F_SETSIG = 10  # fcntl has no name for it


def die_with(lifeline_fd: int, parent: int) -> None:
    """Have this process group killed when the last writer of the pipe ``lifeline_fd``, held by ``parent``, is gone.

    On Linux the kernel does it, so a process stuck in C code dies too, and a thread of the parent may come and go.
    """
    if sys.platform == "linux":
        import fcntl

        fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline_fd, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
    else:
        threading.Thread(target=_watch, args=(lifeline_fd,), daemon=True).start()
    if os.getppid() != parent:  # it was gone before we listened
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _watch(lifeline_fd: int) -> None:
    os.read(lifeline_fd, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)
