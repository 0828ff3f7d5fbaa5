"""Which rows compute next: first prompts that fit, then one decode of all running rows.

Policy only: memory is the block manager's, tensors are the runner's. Rows run in the order of their requests; when
blocks run out, the youngest row gives its blocks back and is computed again later, with the same draws.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from verl.rollout.native.block_manager import BlockManager
from verl.rollout.native.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start`` to ``end`` of a row, to be computed in one step."""

    sequence: Sequence
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether a token can be sampled after it."""
        return self.end == len(self.sequence.tokens)


class Scheduler:
    """Rows waiting and rows running, under a limit of rows and of prompt tokens a step."""

    def __init__(self, blocks: BlockManager, *, max_running_rows: int, max_prefill_tokens: int) -> None:
        self.blocks = blocks
        self.max_running_rows, self.max_prefill_tokens = max_running_rows, max_prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_cached_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether any row is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Put rows at the end of the queue."""
        self.waiting.extend(sequences)

    def prefill(self) -> list[Chunk]:
        """Pieces of waiting rows for one step; empty when none may start. Whole rows become running."""
        chunks: list[Chunk] = []
        budget = self.max_prefill_tokens
        while self.waiting and budget > 0:
            row = self.waiting[0]
            if not row.blocks and not self._admit(row):
                break
            start, end = row.num_computed, min(len(row.tokens), row.num_computed + budget)
            chunks.append(Chunk(row, start, end))
            budget -= end - start
            row.num_computed = end
            self.blocks.publish(row.tokens, row.blocks, end)  # rows behind it in this very step may share them
            if end == len(row.tokens):
                self.running.append(self.waiting.popleft())
        return chunks

    def decode(self, steps: int) -> list[Sequence]:
        """The running rows, each with blocks for ``steps`` more tokens; takes blocks from the youngest at need."""
        i = 0
        while i < len(self.running):
            row = self.running[i]
            if self.blocks.extend(row.blocks, min(len(row.tokens) - 1 + steps, row.max_cached)):
                i += 1
            else:
                self._preempt(self.running.pop())
        return self.running

    def drop_finished(self) -> None:
        """Let finished rows go; their blocks stay known for prompts that begin alike."""
        for row in self.running:
            if row.finish_reason is not None:
                self._release(row)
        self.running = [row for row in self.running if row.finish_reason is None]

    def clear(self) -> None:
        """Give up on all rows and on what is known, after an error in the middle of a step."""
        for row in [*self.running, *self.waiting]:
            self.blocks.release(row.blocks)
        self.running, self.waiting = [], deque()
        self.blocks.forget()

    def check_integrity(self) -> None:
        """The block manager's check against the rows that hold blocks now."""
        self.blocks.check_integrity([row.blocks for row in [*self.running, *self.waiting]])

    def _admit(self, row: Sequence) -> bool:
        if len(self.running) >= self.max_running_rows:
            return False
        allocated = self.blocks.allocate(row.tokens, reserve=len(self.running))  # one block more for each, at least
        if allocated is None:
            return False
        row.blocks, row.num_computed = allocated
        self.num_cached_tokens += row.num_computed
        return True

    def _preempt(self, row: Sequence) -> None:
        self._release(row)
        row.num_computed = 0
        self.waiting.appendleft(row)
        self.num_preemptions += 1

    def _release(self, row: Sequence) -> None:
        self.blocks.publish(row.tokens, row.blocks, row.num_computed)
        self.blocks.release(row.blocks)
