"""What a call gives at once: a handle on a result that lies with the workers, or will."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, NoReturn

from verl.common.waiting import all_done
from verl.controller.results import Result


class Handle:
    """A result to come. As an argument of another group's method it moves from worker to worker, not through here.

    The workers' memory is given back when the last handle and the last call that use it are gone.
    """

    def __init__(self, call: str, future: Future[Result]) -> None:
        self._call, self._future = call, future

    def __repr__(self) -> str:
        state = "running" if not self._future.done() else "failed" if self._future.exception() else "done"
        return f"<Handle {self._call}: {state}>"

    def __reduce__(self) -> NoReturn:
        raise self.inside_error()

    def inside_error(self) -> TypeError:
        """What to raise where this handle is a part of an argument: nothing would load it there."""
        return TypeError(f"{self!r} can't be inside another argument: pass it as an argument of its own, or get() it")

    @property
    def is_done(self) -> bool:
        """Whether the call has ended, well or not."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> Handle:
        """Wait until the call has ended, without fetching anything; see ``get`` for what it raises."""
        self.result(timeout)
        return self

    def get(self, timeout: float | None = None) -> Any:
        """The value, fetched to this process.

        timeout  seconds; the call goes on after TimeoutError
        Raises WorkerError as soon as any rank has failed, TimeoutError.
        """
        return self.result(timeout).load()

    def fetch(self, *columns: str, timeout: float | None = None) -> Any:
        """Only these columns of a batch or a mapping. Raises MissingField for one that isn't there, or as ``get``."""
        return self.result(timeout).load(columns)

    def result(self, timeout: float | None = None) -> Result:
        """The description of the value; see ``get`` for what it raises."""
        if not all_done([self._future], timeout):
            raise TimeoutError(f"{self._call} isn't done after {timeout:g} s")
        return self._future.result()
