"""The order in which prompts are visited, as a pure function of (seed, epoch).

In: a data set and the sizes of a step. Out: the rows of batch k, for any k at any time. There is no iterator whose
state could be saved wrongly: a resumed run asks for the batch after those it has drawn. Knows nothing of steps or
tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache

from verl.common.errors import ConfigError
from verl.common.seeding import derive_seed
from verl.data.prompts import PromptRow


class PromptLoader:
    """Batches of training prompts: batch k holds positions [k*B, (k+1)*B) of the epochs strung together.

    dataset           n rows
    prompts_per_step  B, rows of a batch; may be more than n, and then a batch holds rows more than once
    seed              of the run
    shuffle           False visits the rows in their own order in every epoch
    epochs            passes over the data; a fraction is rounded to whole rows (up); None never ends
    Each epoch visits each row exactly once. Only the last batch of finite epochs may be shorter than B.
    Raises ConfigError for sizes that make no batch.
    """

    def __init__(
        self,
        dataset: Sequence[PromptRow],
        prompts_per_step: int,
        *,
        seed: int,
        shuffle: bool = True,
        epochs: float | None = None,
    ) -> None:
        if not len(dataset):
            raise ConfigError("a loader needs at least one row, got an empty data set (data.train)")
        if prompts_per_step < 1:
            raise ConfigError(f"prompts_per_step must be at least 1, got {prompts_per_step}")
        if epochs is not None and not 0 < epochs < math.inf:
            raise ConfigError(f"epochs must be a number above 0, or null for no end, got {epochs}")
        self._dataset = dataset
        self._prompts_per_step = prompts_per_step
        self._seed = seed
        self._shuffle = shuffle
        self._num_rows = None if epochs is None else math.ceil(round(epochs * len(dataset), 6))
        self._order = lru_cache(maxsize=2)(self._make_order)

    @property
    def num_batches(self) -> int | None:
        """Batches in all epochs, the last partial one counted; None when there is no end."""
        return None if self._num_rows is None else math.ceil(self._num_rows / self._prompts_per_step)

    def ends_at(self, index: int) -> bool:
        """Whether there is no batch ``index``, from 0."""
        return self.num_batches is not None and index >= self.num_batches

    def batch(self, index: int) -> list[PromptRow]:
        """The rows of batch ``index``, from 0; the same for the same index, whatever was asked before.

        A run that has drawn k batches goes on with ``batch(k)``. Raises IndexError past ``num_batches``.
        """
        if index < 0 or self.ends_at(index):
            raise IndexError(f"batch {index} of {self.num_batches}: the epochs end before it")
        start = index * self._prompts_per_step
        stop = start + self._prompts_per_step
        if self._num_rows is not None:
            stop = min(stop, self._num_rows)
        return [self._row(position) for position in range(start, stop)]

    def _row(self, position: int) -> PromptRow:
        epoch, offset = divmod(position, len(self._dataset))
        return self._dataset[self._order(epoch)[offset]]

    def _make_order(self, epoch: int) -> list[int]:
        order = list(range(len(self._dataset)))
        if self._shuffle:
            random.Random(derive_seed("prompt order", self._seed, epoch)).shuffle(order)
        return order


def batches(dataset: Sequence[PromptRow], size: int) -> Iterator[list[PromptRow]]:
    """Every row exactly once, in order, in lists of ``size``; the last may be shorter. For validation.

    Raises ConfigError when ``size`` is less than 1.
    """
    if size < 1:
        raise ConfigError(f"a batch holds at least 1 row, got size {size}")
    return (
        [dataset[i] for i in range(start, min(start + size, len(dataset)))] for start in range(0, len(dataset), size)
    )
