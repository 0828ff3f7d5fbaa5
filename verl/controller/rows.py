"""What has rows, and how rows are taken and joined: batches, lists, tuples and tensors of one axis or more.

torch is asked for only where it is loaded: in a process that hasn't loaded it nothing can be a tensor, and a worker
that needs none starts in a tenth of a second.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl.common.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import TypeIs

    from verl.batch import Batch


def is_tensor(value: object) -> TypeIs[Tensor]:
    """Whether ``value`` is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_batch(value: object) -> TypeIs[Batch]:
    """Whether ``value`` is a batch."""
    module = sys.modules.get("verl.batch")
    return module is not None and isinstance(value, module.Batch)


def num_rows(value: object) -> int | None:
    """Rows of ``value``; None where it has none: numbers, strings, mappings and everything else."""
    if is_batch(value) or isinstance(value, list | tuple):
        return len(value)
    return value.shape[0] if is_tensor(value) and value.dim() else None


def take_rows(value: Any, start: int, stop: int) -> Any:
    """Rows ``start`` to ``stop`` of a value that has rows."""
    if start == 0 and stop == num_rows(value):
        return value
    return value.select(range(start, stop)) if is_batch(value) else value[start:stop]


def join_rows(values: Sequence[Any]) -> Any:
    """The rows of all ``values``, in order; None where all are None.

    Empty ones don't count unless all are: a method given no rows may not know which columns it would have written.
    Raises ShapeError for values without rows, or of different kinds.
    """
    if all(value is None for value in values):
        return None
    counts = [num_rows(value) for value in values]
    if None in counts:
        kinds = ", ".join(sorted({type(value).__name__ for value in values}))
        raise ShapeError(
            f"results of type {kinds} can't be joined: a batch, list, tuple or tensor can; to collect "
            "other results mark the method with split_gather, gather or one_rank"
        )
    full = [value for value, count in zip(values, counts, strict=True) if count] or values[:1]
    first = full[0]
    if len(full) == 1:
        return first
    if is_batch(first):
        return type(first).cat(full)
    if is_tensor(first):
        return sys.modules["torch"].cat(list(full))
    if len({type(value) for value in full}) > 1:
        raise ShapeError(f"results of different types can't be joined: {[type(value).__name__ for value in full]}")
    return type(first)(row for value in full for row in value)


def shard_bounds(rows: int, shards: int) -> list[tuple[int, int]]:
    """(start, stop) of each of ``shards`` runs of neighbouring rows; the first ``rows % shards`` have one row more."""
    size, extra = divmod(rows, shards)
    starts = [i * size + min(i, extra) for i in range(shards + 1)]
    return list(itertools.pairwise(starts))
