"""Small batches written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from verl.batch import Batch

NAN = float("nan")


def make_batch(
    lengths: Sequence[int],
    scores: Sequence[float],
    *,
    masked: Sequence[tuple[int, int]] = (),
    groups: Sequence[int] | None = None,
    rows: Mapping[str, Sequence[float]] | None = None,
    **ragged: Sequence[Sequence[float]],
) -> Batch:
    """A batch of responses of ``lengths``, each a group of its own unless ``groups`` says otherwise (empty: no column).

    ``masked`` are (row, token) places of tool output.
    """
    batch = Batch([{} for _ in lengths])
    total = sum(lengths)
    batch.put("response_ids", torch.arange(total), list(lengths))
    starts = torch.tensor([0, *lengths]).cumsum(0)
    mask = torch.ones(total, dtype=torch.bool)
    for row, token in masked:
        mask[starts[row] + token] = False
    batch.put("response_mask", mask)
    batch.put("scores", torch.tensor(list(scores), dtype=torch.float32))
    groups = range(len(lengths)) if groups is None else groups
    if len(groups):
        batch.put("group_id", torch.tensor(list(groups)))
    for name, column in (rows or {}).items():
        batch.put(name, torch.tensor(list(column)))
    for name, per_row in ragged.items():
        assert [len(row) for row in per_row] == list(lengths), name
        batch.put(name, torch.tensor([x for row in per_row for x in row], dtype=torch.float32))
    return batch


def columns_of(batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
    """The padded columns of a micro-batch; padding holds NaN so that reading it shows."""
    return {n: batch.padded(n) if n == "response_mask" else batch.padded(n, NAN) for n in names}


def near(values: Tensor, expected: object, tol: float = 1e-5) -> None:
    """Assert equality up to ``tol``."""
    torch.testing.assert_close(values.double(), torch.as_tensor(expected, dtype=torch.float64), atol=tol, rtol=tol)


def limited(algorithm, tokens):
    """``algorithm`` of a run whose responses have at most ``tokens``."""
    algorithm.max_response_tokens = tokens
    return algorithm
