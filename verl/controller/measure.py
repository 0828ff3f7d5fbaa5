"""What a call costs the program, against the size of what passes and the number of workers.

The workers load no tensors and do nothing, so what is measured is the controller.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from verl.controller.controller import Controller
from verl.controller.dispatch import broadcast, dispatch, gather
from verl.controller.place import Place
from verl.controller.pool import ResourcePool

SIZES = tuple(1024 * 4**i for i in range(9))
"""1 KB to 64 MB."""
RANKS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class CallCost:
    """Medians over calls.

    payload_bytes  of each rank's argument, which another rank made
    submit_s       until the program has its handle
    busy_s         processor time of the program, its threads included
    total_s        until the consumer has read the argument and answered
    """

    num_ranks: int
    payload_bytes: int
    submit_s: float
    busy_s: float
    total_s: float


class _Dummy:
    def __init__(self, place: Place) -> None:
        self.place = place

    @dispatch(gather)
    def make(self, num_bytes: int) -> bytes:
        return bytes(num_bytes)

    @dispatch(broadcast)
    def take(self, payload: Any) -> None:
        return


def measure_calls(
    sizes: Sequence[int] = SIZES, ranks: Sequence[int] = RANKS, *, num_calls: int = 20, executor: str = "processes"
) -> list[dict[str, float]]:
    """Each size with 2 ranks, and the smallest with each number of ranks; rows of ``CallCost``.

    A producer makes the payload once; then each call passes its handle to a consumer of as many ranks.
    """
    cells = [(2, size) for size in sizes] + [(count, sizes[0]) for count in ranks if count != 2]
    return [asdict(_measure(executor, count, size, num_calls)) for count, size in cells]


def _measure(executor: str, num_ranks: int, payload_bytes: int, num_calls: int) -> CallCost:
    with Controller(executor) as controller:
        producer = controller.group("producer", _Dummy, ResourcePool(1, kind="cpu"))
        consumer = controller.group("consumer", _Dummy, ResourcePool(num_ranks, kind="cpu"))
        payload = producer.make(payload_bytes).wait()
        consumer.take(payload).wait()
        costs = [_timed(lambda: consumer.take(payload)) for _ in range(num_calls)]
    submit, busy, total = (statistics.median(column) for column in zip(*costs, strict=True))
    return CallCost(num_ranks, payload_bytes, submit, busy, total)


def _timed(call: Callable[[], Any]) -> tuple[float, float, float]:
    busy, start = time.process_time(), time.perf_counter()
    handle = call()
    submitted = time.perf_counter()
    handle.wait()
    return submitted - start, time.process_time() - busy, time.perf_counter() - start
