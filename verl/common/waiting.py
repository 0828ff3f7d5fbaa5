"""Waiting for what other threads do, in a way that a signal ends."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable
from concurrent.futures import Future
from time import monotonic
from typing import Any, TypeVar

POLL_S = 0.5

T = TypeVar("T")


def result_of(future: Future[T]) -> T:
    """``future.result()``, waited for as in ``all_done``."""
    all_done([future])
    return future.result()


def all_done(futures: Iterable[Future[Any]], timeout_s: float | None = None) -> bool:
    """Wait until all of ``futures`` have ended, well or not, or ``timeout_s`` have passed: whether they have ended.

    The kernel hands a signal to any thread, and Python runs its handler in the main one, which goes on waiting for a
    lock if it was another thread that was woken. So no wait here is longer than POLL_S.
    """
    waiting, end = set(futures), None if timeout_s is None else monotonic() + timeout_s
    while waiting:
        left = POLL_S if end is None else min(POLL_S, max(0.0, end - monotonic()))
        left_over = concurrent.futures.wait(waiting, timeout=left).not_done
        waiting = {future for future in left_over if not future.done()}  # to ``wait``, a cancelled one isn't
        if waiting and end is not None and monotonic() >= end:
            return False
    return True
