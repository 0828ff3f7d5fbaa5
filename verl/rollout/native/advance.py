"""What a sampled token does to its row: the end of a decode step, in torch operations, for any device.

Takes tokens and log-probs; writes them out and advances the rows in place. Reads nothing from the host. Shape letters:
B rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.rollout.native.row_state import RowState


@dataclass(frozen=True)
class Outputs:
    """What steps sampled: step ``count`` writes row ``count``. A row that wasn't running has token -1, log-prob 0.

    tokens [steps, B] int32, log_probs [steps, B] float32, count [1] int64
    """

    tokens: Tensor
    log_probs: Tensor
    count: Tensor

    @staticmethod
    def empty(steps: int, rows: int, device: torch.device) -> Outputs:
        """Room for ``steps`` steps."""
        return Outputs(
            torch.zeros(steps, rows, dtype=torch.int32, device=device),
            torch.zeros(steps, rows, dtype=torch.float32, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
        )

    def first(self, rows: int) -> Outputs:
        """The columns of the first ``rows`` rows, in the same memory."""
        return Outputs(self.tokens[:, :rows], self.log_probs[:, :rows], self.count)


def advance(tokens: Tensor, log_probs: Tensor, rows: RowState, out: Outputs) -> None:
    """Write tokens [B] int64 and log-probs [B] float32 to row ``count`` of ``out`` and step every running row.

    A row ends with a stop id, once it has its minimum of tokens, or when no token is left to it; it then has left 0 and
    position -1. A row that isn't running stays as it is.
    """
    is_running = rows.left > 0
    count = out.count.long()
    out.tokens.index_copy_(0, count, torch.where(is_running, tokens, -1).to(torch.int32)[None])
    out.log_probs.index_copy_(0, count, torch.where(is_running, log_probs, 0.0)[None])
    index = rows.index + 1
    is_stop = (rows.stop_ids == tokens[:, None]).any(1) & (index >= rows.min_new)
    left = torch.where(is_stop, 0, rows.left - 1)
    positions = torch.where(left > 0, rows.positions + 1, -1)
    for column, value in [(rows.tokens, tokens), (rows.index, index), (rows.left, left), (rows.positions, positions)]:
        column.copy_(torch.where(is_running, value, column))
