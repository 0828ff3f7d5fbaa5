"""Work that goes on beside its owner: one task at a time, on a thread, whose errors come back. Knows no task."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from verl.common.waiting import all_done


class Background:
    """Runs a task beside the caller. A program that ends waits for it; one that is killed doesn't.

    name  of the thread
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._task: Future[object] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a task hasn't ended yet."""
        return self._task is not None and not self._task.done()

    def start(self, task: Callable[[], object]) -> None:
        """Begin ``task``, after the one before has ended. Raises what that one raised, and doesn't begin then."""
        self.wait()
        thread = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        self._task = thread.submit(task)
        thread.shutdown(wait=False)

    def check(self) -> None:
        """Raise what the last task raised, if it has ended so and nobody has been told; waits for nothing."""
        if not self.is_running:
            self.wait()

    def wait(self) -> None:
        """Wait for the task to end. Raises what it raised, once."""
        if self._task is not None:
            all_done([self._task])
            ended, self._task = self._task, None
            ended.result()
