"""``run_ranks(n, fn)``: run a function on n real processes and hand back what each returned."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import cloudpickle

_PRELOADED = ["torch.distributed.tensor", "transformers.modeling_utils", "verl.engines.base", "tests.tiny"]


class RankFailed(AssertionError):
    """A rank raised, died or hung; the text carries its traceback."""


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, backend: str = "gloo", timeout_s: float = 120) -> list[Any]:
    """``[fn(0, *args), .., fn(n - 1, *args)]``, each in a process of its own, in one group of n ranks.

    fn         any function, a local one or a lambda too; its result must pickle
    timeout_s  the ranks are killed after this many seconds
    Raises RankFailed with the remote traceback as soon as one rank raises or dies; the others are killed.
    """
    context = multiprocessing.get_context("forkserver")  # forks of a process that has only imported
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        store, work = Path(folder) / "store", cloudpickle.dumps((fn, args))
        ends, workers = [], []
        for rank in range(n):
            near, far = context.Pipe(duplex=False)
            workers.append(context.Process(target=_main, args=(rank, n, backend, str(store), work, far), daemon=True))
            workers[-1].start()
            far.close()
            ends.append(near)
        try:
            return _collect(ends, monotonic() + timeout_s)
        finally:
            for worker in workers:
                worker.join(timeout=10 if sys.exc_info()[0] is None else 0)
                worker.kill()
                worker.join()


def _collect(ends: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ends):
        waiting = [end for rank, end in enumerate(ends) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - monotonic()))
        if not ready:
            raise RankFailed(f"ranks {[ends.index(end) for end in waiting]} gave no answer in time")
        for end in ready:
            rank = ends.index(end)  # type: ignore[arg-type]
            try:
                is_good, payload = end.recv()  # type: ignore[union-attr]
            except EOFError:
                raise RankFailed(f"rank {rank} died without a word") from None
            if not is_good:
                raise RankFailed(f"rank {rank} raised:\n{payload}")
            results[rank] = cloudpickle.loads(payload)
    return [results[rank] for rank in range(len(ends))]


def _main(rank: int, world_size: int, backend: str, store: str, work: bytes, answer: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    if backend == "nccl":
        torch.cuda.set_device(rank)
    try:
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
        fn, args = cloudpickle.loads(work)
        answer.send((True, cloudpickle.dumps(fn(rank, *args))))
        dist.barrier()  # a rank that leaves early would cut off the others
        dist.destroy_process_group()
    except BaseException:
        answer.send((False, traceback.format_exc()))
