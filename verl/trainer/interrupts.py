"""Ctrl-C and SIGTERM at a moment where nothing is half done.

The first signal stops a generation or a scoring at once and waits for an update or a save to end; the second one ends
the process as it would have without us.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """The user asked the run to stop; state is as of the last whole step."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class Interrupts:
    """Turns signals into ``Interrupted``, at once or when a protected block ends."""

    def __init__(self) -> None:
        self._pending: int | None = None
        self._protected = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside the block; outside the main thread signals can't be handled and nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._pending = None

    @contextmanager
    def protected(self) -> Iterator[None]:
        """A block that is finished before a signal takes effect."""
        with self.ignored():
            yield
        self._raise_pending()

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """A block that a first signal doesn't end, nor what comes after it: the last one of a run."""
        self._protected += 1
        try:
            yield
        finally:
            self._protected -= 1

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Within ``protected``: a block that a signal may end at once, because nothing is half done in it."""
        protected, self._protected = self._protected, 0
        try:
            self._raise_pending()
            yield
        finally:
            self._protected = protected

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._pending is not None:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._pending = number
        self._raise_pending()

    def _raise_pending(self) -> None:
        if self._pending is not None and not self._protected:
            raise Interrupted(self._pending)
