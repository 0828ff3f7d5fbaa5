"""Micro-batches of judged answers, written by hand: ragged log-probs under the policy and the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.algorithms.rows import NAN

CHOSEN = [[-1.0, -2.5], [-0.75], [-0.5, -1.25, -2.0, -0.1]]
REJECTED = [[-2.0, -1.5, -0.25], [-3.0], [-1.0, -0.5]]
REF_CHOSEN = [[-1.5, -2.0], [-1.0], [-0.75, -1.0, -2.5, -0.2]]
REF_REJECTED = [[-1.75, -1.0, -0.5], [-2.0], [-1.5, -0.25]]


def judged(
    rows: Sequence[Sequence[float]],
    ref: Sequence[Sequence[float]],
    is_chosen: Sequence[bool],
    pairs: Sequence[int] | None = None,
    kl: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs [B, R] with gradient, NaN beyond each row's end, and the columns."""
    width = max(map(len, rows))

    def padded(values: Sequence[Sequence[float]]) -> Tensor:
        return torch.tensor([[*row, *[NAN] * (width - len(row))] for row in values])

    columns = {
        "response_mask": torch.tensor([[i < len(row) for i in range(width)] for row in rows]),
        "ref_log_probs": padded(ref),
        "is_chosen": torch.tensor(list(is_chosen)),
    }
    if pairs is not None:
        columns["pair_id"] = torch.tensor(list(pairs))
    if kl is not None:
        columns["kl_estimate"] = torch.full((len(rows),), kl)
    return padded(rows).requires_grad_(), columns


def three_pairs() -> tuple[Tensor, dict[str, Tensor]]:
    """The pairs above: all chosen answers, then all rejected ones."""
    return judged(CHOSEN + REJECTED, REF_CHOSEN + REF_REJECTED, [True] * 3 + [False] * 3, [0, 1, 2, 0, 1, 2])
