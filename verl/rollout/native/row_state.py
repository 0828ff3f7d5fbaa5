"""Running rows as tensors on the device: what a decode step reads and advances, in slots that stay where they are.

Slot i is row i of every tensor; a step runs the first B slots. The host writes a slot when a row enters it and
afterwards only adds blocks to its table; tokens and positions advance on the device alone. All columns lie in one
tensor, so entering, moving and leaving are one copy each. Shape letters: R slots, S stop ids, W blocks of a row.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.rollout.native.sequence import Sequence

_INTS = ("tokens", "positions", "left", "index", "seed_low", "seed_high", "min_new", "top_k")
_FLOATS = ("temperature", "top_p", "min_p")
_POSITIONS, _LEFT = _INTS.index("positions"), _INTS.index("left")


@dataclass(frozen=True)
class RowState:
    """R slots: their columns by name, and

    stop_ids  [R, S] int32, padded with -1
    tables    [R, W] int32: blocks of the row, 0 (the padding block) right of its last
    """

    columns: Tensor
    stop_ids: Tensor
    tables: Tensor

    @staticmethod
    def empty(slots: int, stop_ids: int, width: int, device: torch.device) -> RowState:
        """Slots in which nothing runs."""
        columns = torch.zeros(len(_INTS) + len(_FLOATS), slots, dtype=torch.int32, device=device)
        columns[_POSITIONS] = -1
        stops = torch.full((slots, stop_ids), -1, dtype=torch.int32, device=device)
        return RowState(columns, stops, torch.zeros(slots, width, dtype=torch.int32, device=device))

    @staticmethod
    def of(rows: Rows[Sequence], vocab_size: int, *, stop_ids: int | None = None, width: int | None = None) -> RowState:
        """The state of ``rows``, all of whose tokens but the last are computed, on the CPU.

        stop_ids, width  S and W; as many as the rows need where left out
        """
        stops = [sorted(i for i in row.stop_ids if 0 <= i < vocab_size) for row in rows]
        count = max(map(len, stops)) if stop_ids is None else stop_ids
        blocks = max(len(row.blocks) for row in rows) if width is None else width
        seeds = [int(row.request.seed) & 0xFFFFFFFFFFFFFFFF for row in rows]  # numpy's integers have no such mask
        settings = [row.request.sampling for row in rows]
        ints = [
            [row.tokens[-1] for row in rows],
            [len(row.tokens) - 1 for row in rows],
            [row.max_tokens - len(row.tokens) for row in rows],
            [row.num_response for row in rows],
            [_signed(seed & 0xFFFFFFFF) for seed in seeds],
            [_signed(seed >> 32) for seed in seeds],
            [s.min_new_tokens for s in settings],
            [min(s.top_k, vocab_size) for s in settings],
        ]
        floats = [[getattr(s, name) for s in settings] for name in _FLOATS]
        columns = [torch.tensor(ints, dtype=torch.int32), torch.tensor(floats, dtype=torch.float32).view(torch.int32)]
        return RowState(
            torch.cat(columns),
            _padded(stops, count, -1),
            _padded([row.blocks for row in rows], blocks, 0),
        )

    @property
    def num_slots(self) -> int:
        """R."""
        return self.columns.shape[1]

    @property
    def tokens(self) -> Tensor:
        """[R] last token of each row, whose keys aren't in the cache yet."""
        return self._ints("tokens")

    @property
    def positions(self) -> Tensor:
        """[R] its position; -1 where nothing runs."""
        return self._ints("positions")

    @property
    def left(self) -> Tensor:
        """[R] tokens that the row may still sample; 0 where nothing runs."""
        return self._ints("left")

    @property
    def index(self) -> Tensor:
        """[R] which token of its response the row samples next."""
        return self._ints("index")

    @property
    def seed_low(self) -> Tensor:
        """[R] low half of the row's seed."""
        return self._ints("seed_low")

    @property
    def seed_high(self) -> Tensor:
        """[R] high half of the row's seed."""
        return self._ints("seed_high")

    @property
    def min_new(self) -> Tensor:
        """[R] index before which stop ids can't be sampled."""
        return self._ints("min_new")

    @property
    def top_k(self) -> Tensor:
        """[R] 0 keeps all."""
        return self._ints("top_k")

    @property
    def temperature(self) -> Tensor:
        """[R] float32; 0 is greedy."""
        return self._floats("temperature")

    @property
    def top_p(self) -> Tensor:
        """[R] float32; 1 keeps all."""
        return self._floats("top_p")

    @property
    def min_p(self) -> Tensor:
        """[R] float32; 0 keeps all."""
        return self._floats("min_p")

    def first(self, count: int) -> RowState:
        """The first ``count`` slots, in the same memory."""
        return RowState(self.columns[:, :count], self.stop_ids[:count], self.tables[:count])

    def at(self, slots: Tensor) -> RowState:
        """A copy of some slots, [n] int64."""
        return RowState(self.columns[:, slots], self.stop_ids[slots], self.tables[slots])

    def put(self, slots: Tensor, rows: RowState) -> None:
        """Write ``rows`` into ``slots`` [n] int64; their tables may be narrower: what lies right is masked."""
        self.columns.index_copy_(1, slots, rows.columns)
        self.stop_ids.index_copy_(0, slots, rows.stop_ids)
        self.tables[:, : rows.tables.shape[1]].index_copy_(0, slots, rows.tables)

    def clear(self, start: int, end: int) -> None:
        """Nothing runs in slots ``start`` to ``end`` any more."""
        self.columns[_POSITIONS, start:end] = -1
        self.columns[_LEFT, start:end] = 0

    def slots_in_cache(self, block_size: int) -> Tensor:
        """[R] int64: where the keys of this step's tokens go; into the padding block where nothing runs."""
        positions = self.positions.clamp(min=0).long()
        blocks = self.tables.gather(1, (positions // block_size)[:, None])[:, 0].long()
        return torch.where(self.positions < 0, 0, blocks * block_size + positions % block_size)

    def _ints(self, name: str) -> Tensor:
        return self.columns[_INTS.index(name)]

    def _floats(self, name: str) -> Tensor:
        return self.columns[len(_INTS) + _FLOATS.index(name)].view(torch.float32)


def _padded(rows: list[list[int]], width: int, filler: int) -> Tensor:
    padded = torch.full((len(rows), width), filler, dtype=torch.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return padded


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
