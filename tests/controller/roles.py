"""Roles that the tests put on workers. Those that need no tensors load no torch, so their workers start at once."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from verl.common.errors import UnknownName
from verl.controller import (
    Place,
    broadcast,
    dispatch,
    gather,
    join,
    joint,
    last_stage,
    one_rank,
    split_gather,
    split_rows,
)


class Echo:
    """Says what it was given and where it stands."""

    def __init__(self, place: Place, offset: int = 0) -> None:
        self.place, self.offset = place, offset
        self.log: list[Any] = []

    @dispatch(broadcast)
    def to_everyone(self, value: Any) -> Any:
        return self.place.rank, value

    @dispatch(one_rank)
    def to_first(self, value: Any) -> Any:
        self.log.append(value)
        return self.place.rank, value

    @dispatch(gather)
    def of_all(self, value: Any) -> Any:
        return self.place.rank, value

    @dispatch(gather)
    def logged(self) -> list[Any]:
        return self.log

    @dispatch(gather)
    def seen(self) -> tuple[int, Place]:
        return os.getpid(), self.place

    @dispatch(split_rows)
    def add(self, rows: Sequence[int], more: int = 0) -> list[int]:
        self.log.append(list(rows))
        return [row + self.offset + more for row in rows]

    @dispatch(split_gather)
    def total(self, rows: Sequence[int], *, keep: Sequence[str] = ()) -> tuple[int, int, list[str]]:
        return self.place.dp_rank, sum(rows), list(keep)

    @dispatch(last_stage)
    def stage(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        return [(self.place.pp_rank, row) for row in rows]

    @dispatch(split_rows)
    def first_stage(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        return [(self.place.pp_rank, row) for row in rows]

    @dispatch(gather)
    def write(self, text: str) -> None:
        self.log.append(text)

    @dispatch(gather)
    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.place.rank


class Trouble:
    """Goes wrong in the ways that workers do."""

    def __init__(self, place: Place, fail_at: int = -1, refuse_at: int = -1) -> None:
        self.place = place
        if place.rank == refuse_at:
            raise UnknownName("sort", "twig", ["twin"])
        if place.rank == fail_at:
            raise ValueError(f"no object on rank {place.rank}")

    @dispatch(gather)
    def raises(self, rank: int, others_sleep_s: float = 0) -> int:
        if self.place.rank == rank:
            raise KeyError("nothing there")
        time.sleep(others_sleep_s)
        return self.place.rank

    @dispatch(joint(gather))
    def raises_among_others(self, rank: int) -> None:
        if self.place.rank == rank:
            raise KeyError("nothing there")
        time.sleep(600)

    @dispatch(gather)
    def dies(self, rank: int, others_sleep_s: float = 0) -> None:
        if self.place.rank == rank:
            sys.stderr.write("last words of the worker\n")
            sys.stderr.flush()
            os.kill(os.getpid(), 9)
        time.sleep(others_sleep_s)

    @dispatch(gather)
    def leaves(self, code: int) -> None:
        raise SystemExit(code)

    @dispatch(gather)
    def hangs(self, rank: int) -> None:
        if self.place.rank == rank:
            time.sleep(600)

    @dispatch(gather)
    def unpicklable(self) -> Any:
        return sys.stderr

    @dispatch(gather)
    def fine(self) -> int:
        return self.place.rank


class Tensors:
    """Makes and reads tensors and batches, and sums over ranks."""

    def __init__(self, place: Place, meet: bool = False) -> None:
        self.place = place
        if meet:
            join(place)

    @dispatch(split_rows)
    def responses(self, rows: Sequence[int]) -> Any:
        """A batch: row i has i + 1 tokens, each of them i, and the score i / 10."""
        import torch

        from verl.batch import Batch

        batch = Batch([{"prompt": f"p{row}"} for row in rows])
        ids = [token for row in rows for token in [row] * (row + 1)]
        batch.put("response_ids", torch.tensor(ids, dtype=torch.int64), [row + 1 for row in rows])
        batch.put("scores", torch.tensor(rows, dtype=torch.float32) / 10)
        return batch

    @dispatch(split_rows)
    def with_log_probs(self, batch: Any) -> Any:
        batch.put("old_log_probs", -batch["response_ids"].float())
        return batch

    @dispatch(split_gather)
    def token_sum(self, batch: Any) -> int:
        return int(batch["response_ids"].sum()) if len(batch) else 0

    @dispatch(split_rows)
    def noise(self, rows: Any, width: int) -> Any:
        import torch

        return torch.arange(len(rows) * width, dtype=torch.float32).reshape(len(rows), width) + rows[:, None]

    @dispatch(split_gather)
    def shapes(self, rows: Any) -> tuple[int, ...]:
        return tuple(rows.shape)

    @dispatch(split_gather)
    def all_sum(self, rows: Any) -> float:
        import torch.distributed as dist

        total = rows.sum()
        dist.all_reduce(total)
        return float(total)
