"""The order in which rows are visited, as a pure function of (seed, epoch).

In: a data set and the sizes of a step. Out: the rows of batch k, for any k at any time. There is no iterator whose
state could be saved wrongly: a resumed run asks for the batch after those it has drawn. Knows nothing of steps or
tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Generic, TypeVar

from verl.common.errors import ConfigError
from verl.common.seeding import derive_seed

RowT = TypeVar("RowT")


class Loader(Generic[RowT]):
    """Batches of training rows: batch k holds positions [k*B, (k+1)*B) of the epochs strung together.

    dataset         n rows
    rows_per_batch  B, rows of a batch; may be more than n, and then a batch holds rows more than once
    seed            of the run
    shuffle         False visits the rows in their own order in every epoch
    epochs          passes over the data; a fraction is rounded to whole rows (up); None never ends
    Each epoch visits each row exactly once. Only the last batch of finite epochs may be shorter than B.
    Raises ConfigError for sizes that make no batch.
    """

    def __init__(
        self,
        dataset: Sequence[RowT],
        rows_per_batch: int,
        *,
        seed: int,
        shuffle: bool = True,
        epochs: float | None = None,
    ) -> None:
        if not len(dataset):
            raise ConfigError("a loader needs at least one row, got an empty data set (data.train)")
        if rows_per_batch < 1:
            raise ConfigError(f"a batch holds at least 1 row, got rows_per_batch={rows_per_batch}")
        if epochs is not None and not 0 < epochs < math.inf:
            raise ConfigError(f"epochs must be a number above 0, or null for no end, got {epochs}")
        self._dataset = dataset
        self._rows_per_batch = rows_per_batch
        self._seed = seed
        self._shuffle = shuffle
        self._num_rows = None if epochs is None else math.ceil(round(epochs * len(dataset), 6))
        self._order = lru_cache(maxsize=2)(self._make_order)

    @property
    def num_batches(self) -> int | None:
        """Batches in all epochs, the last partial one counted; None when there is no end."""
        return None if self._num_rows is None else math.ceil(self._num_rows / self._rows_per_batch)

    def ends_at(self, index: int) -> bool:
        """Whether there is no batch ``index``, from 0."""
        return self.num_batches is not None and index >= self.num_batches

    def batch(self, index: int) -> list[RowT]:
        """The rows of batch ``index``, from 0; the same for the same index, whatever was asked before.

        A run that has drawn k batches goes on with ``batch(k)``. Raises IndexError past ``num_batches``.
        """
        if index < 0 or self.ends_at(index):
            raise IndexError(f"batch {index} of {self.num_batches}: the epochs end before it")
        start = index * self._rows_per_batch
        stop = start + self._rows_per_batch
        if self._num_rows is not None:
            stop = min(stop, self._num_rows)
        return [self._row(position) for position in range(start, stop)]

    def _row(self, position: int) -> RowT:
        epoch, offset = divmod(position, len(self._dataset))
        return self._dataset[self._order(epoch)[offset]]

    def _make_order(self, epoch: int) -> list[int]:
        order = list(range(len(self._dataset)))
        if self._shuffle:
            random.Random(derive_seed("prompt order", self._seed, epoch)).shuffle(order)
        return order


def batches(dataset: Sequence[RowT], size: int) -> Iterator[list[RowT]]:
    """Every row exactly once, in order, in lists of ``size``; the last may be shorter. For validation.

    Raises ConfigError when ``size`` is less than 1.
    """
    if size < 1:
        raise ConfigError(f"a batch holds at least 1 row, got size {size}")
    return (
        [dataset[i] for i in range(start, min(start + size, len(dataset)))] for start in range(0, len(dataset), size)
    )
