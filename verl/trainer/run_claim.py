"""The right to write in a run directory: of one process at a time.

The system drops it when its holder dies, however it dies, so a killed run leaves nothing to clear up. Knows nothing of
what is written there.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from pathlib import Path
from typing import TextIO
from weakref import WeakValueDictionary

from verl.common.errors import ConfigError

log = logging.getLogger(__name__)

LOCK = ".run.lock"

_MUTEX = threading.Lock()
_HOLDERS: WeakValueDictionary[str, RunClaim] = WeakValueDictionary()
"""Of this process, by real path: a process that opens a locked file again and closes it loses the lock."""


class RunClaim:
    """The claim of one trainer on a run directory, which must exist.

    Within a process the newest trainer takes it over: an older one of a notebook cell that ran before isn't at work.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: TextIO | None = None

    def take(self) -> None:
        """Hold the directory until ``release``, or until this object is gone. May be called twice.

        Raises ConfigError, naming the process, while another one holds it. Where the file system has no locks, nothing
        is held.
        """
        key = os.path.realpath(self.folder)
        with _MUTEX:
            holder = _HOLDERS.get(key)
            if holder is None or holder._file is None:
                self._file = self._lock()
            elif holder is not self:
                self._file, holder._file = holder._file, None
            _HOLDERS[key] = self

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()

    def release(self) -> None:
        """Let others have it."""
        with _MUTEX:
            if self._file is not None:
                self._file.close()
            self._file = None

    def _lock(self) -> TextIO | None:
        path = self.folder / LOCK
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            with file:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    log.warning("%s can't be locked (%s): start no second run in it", self.folder, error)
                    return None
                file.seek(0)
                raise ConfigError(
                    f"trainer.output_dir={str(self.folder)!r} is in use by another run, process "
                    f"{file.read(20).strip() or 'unknown'}: end that one or let it end, or name another folder"
                ) from None
        _note_holder(file)
        return file


def _note_holder(file: TextIO) -> None:
    """Who holds it, for the message; on a full disk it does without."""
    try:
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
    except OSError as error:
        log.debug("%s: %s", file.name, error)
