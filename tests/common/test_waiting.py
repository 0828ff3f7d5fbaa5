from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from verl.common.waiting import all_done


@pytest.fixture
def handled() -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGUSR1, stop)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_another_thread_gets_ends_the_wait(handled: None) -> None:
    future: Future[None] = Future()

    def work() -> None:
        time.sleep(0.3)  # by then the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        time.sleep(10)
        future.set_result(None)

    started = time.monotonic()
    threading.Thread(target=work, daemon=True).start()
    with pytest.raises(InterruptedError):
        all_done([future])
    assert time.monotonic() - started < 5


def test_all_must_end_well_or_not() -> None:
    good, bad, late = (Future[int]() for _ in range(3))
    good.set_result(1)
    bad.set_exception(ValueError())
    assert all_done([good, bad]) and all_done([])
    cancelled: Future[int] = Future()
    threading.Timer(0.1, cancelled.cancel).start()
    assert all_done([cancelled], timeout_s=10)
    assert not all_done([good, late], timeout_s=0.05)
    threading.Timer(0.1, late.set_result, [2]).start()
    assert all_done([late, bad], timeout_s=10) and late.result() == 2
