"""Running rows as tensors on the device: what a decode step reads and advances. Shape letters: B rows, W blocks."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.rollout.native.sampler import SamplingState
from verl.rollout.native.sequence import Sequence


@dataclass
class DecodeState:
    """Running rows between two steps.

    tokens     [B] int64  last token of each row, whose keys aren't in the cache yet
    positions  [B] int64  its position
    last       [B] int64  last position that the row may compute: a step past its end repeats it, harmlessly
    tables     [B, W] int64  the row's blocks, 0 (the padding block) right of its last
    sampling   settings and counters
    """

    tokens: Tensor
    positions: Tensor
    last: Tensor
    tables: Tensor
    sampling: SamplingState

    @property
    def tensors(self) -> list[Tensor]:
        """All columns, in one order."""
        return [self.tokens, self.positions, self.last, self.tables, *self.sampling.tensors]

    @staticmethod
    def of(rows: Rows[Sequence], vocab_size: int, width: int, device: torch.device) -> DecodeState:
        """The state of ``rows``; ``width`` is W."""
        tables = [[*row.blocks, *[0] * (width - len(row.blocks))] for row in rows]
        return DecodeState(
            tokens=torch.tensor([row.tokens[-1] for row in rows]).to(device),
            positions=torch.tensor([len(row.tokens) - 1 for row in rows]).to(device),
            last=torch.tensor([row.max_cached - 1 for row in rows]).to(device),
            tables=torch.tensor(tables).to(device),
            sampling=SamplingState.of(rows, vocab_size, device),
        )

    def slots(self, block_size: int) -> Tensor:
        """[B] int64: where the keys of this step's tokens go."""
        blocks = self.tables.gather(1, (self.positions // block_size)[:, None])[:, 0]
        return blocks * block_size + self.positions % block_size
