"""Which rows compute next: first prompts that fit, then some decode steps of all running rows.

Policy only: memory is the block manager's, tensors are the runner's. Rows run in the order of their requests; when
blocks run out, the youngest row gives its blocks back and is computed again later, with the same draws. Results may
be on their way while the next step is planned: a row counts its launched tokens (``in_flight``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from verl.rollout.native.block_manager import BlockManager
from verl.rollout.native.sequence import Sequence

_REFILL_PARTS = 16  # waiting rows start when this part of all places is free, or none runs


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


@dataclass(frozen=True)
class Fork:
    """A row whose tokens are exactly those of ``source``, computed in this very step: it shares that row's result.

    copy  blocks (from, to): the partly filled last block, of which it needs one of its own; None if there is none
    """

    source: Sequence
    sequence: Sequence
    copy: tuple[int, int] | None


@dataclass
class Prefill:
    """One step of prompts: pieces to compute, and rows that need no computing."""

    chunks: list[Chunk] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)

    @property
    def sampled(self) -> list[Sequence]:
        """Rows that sample a token after it."""
        return [c.sequence for c in self.chunks if c.is_last] + [fork.sequence for fork in self.forks]


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

    def prefill(self) -> Prefill:
        """Pieces of waiting rows for one step, and rows equal to those; empty when none may start.

        Whole rows become running. Few free places are left alone until some more are free: a step of few rows costs
        the running ones more than it gives.
        """
        work = Prefill()
        budget = self.max_prefill_tokens
        if not self._is_worth_a_step():
            return work
        while self.waiting and budget > 0:
            row = self.waiting[0]
            if not row.blocks and not self._admit(row):
                break
            start, end = row.num_computed, min(len(row.tokens), row.num_computed + budget)
            work.chunks.append(Chunk(row, start, end))
            budget -= end - start
            row.num_computed = end
            self.blocks.publish(row.tokens, row.blocks, end)  # rows behind it in this very step may share them
            if end == len(row.tokens):
                self.running.append(self.waiting.popleft())
                work.forks.extend(self._forks_of(row))
        for row in work.sampled:
            row.in_flight += 1
        return work

    def decode(self, most: int) -> tuple[list[Sequence], int] | None:
        """Running rows with tokens left to sample, and how many steps, at most ``most``, to launch for them.

        Each has blocks for so many tokens more; at need they are taken from the youngest row. None, and nothing
        launched, while that has to wait for results on their way: rows among them may have ended.
        """
        rows = [row for row in self.running if row.remaining > 0]
        if not rows:
            return None
        steps = min(most, max(row.remaining for row in rows))
        i = 0
        while i < len(rows):
            row = rows[i]
            if self.blocks.extend(row.blocks, min(len(row.tokens) - 1 + row.in_flight + steps, row.max_cached)):
                i += 1
            elif any(other.in_flight for other in self.running):
                return None
            else:
                self._preempt(self.running.pop())
                rows.pop()
        for row in rows:
            row.in_flight += steps
        return rows, steps

    def drop_finished(self) -> None:
        """Let finished rows go; their blocks stay known for prompts that begin alike.

        What is still in flight for them writes behind their end, and before anything that is launched later.
        """
        for row in self.running:
            if row.finish_reason is not None:
                self._release(row)
        self.running = [row for row in self.running if row.finish_reason is None]

    def stop_all(self) -> None:
        """Let all rows go, what is computed of them stays known. Nothing may be in flight."""
        for row in [*self.running, *self.waiting]:
            self._release(row)
        self.running, self.waiting = [], deque()

    def check_integrity(self) -> None:
        """The block manager's check against the rows that hold blocks now."""
        self.blocks.check_integrity([row.blocks for row in [*self.running, *self.waiting]])

    def _is_worth_a_step(self) -> bool:
        has_begun = bool(self.waiting) and bool(self.waiting[0].blocks)
        free = self.max_running_rows - len(self.running)
        return not self.running or has_begun or free >= min(len(self.waiting), self.max_running_rows // _REFILL_PARTS)

    def _forks_of(self, row: Sequence) -> list[Fork]:
        """Admit the rows next in the queue that have exactly the tokens of ``row``."""
        forks: list[Fork] = []
        while self.blocks.share and self.waiting and len(self.running) < self.max_running_rows:
            twin = self.waiting[0]
            if twin.blocks or twin.tokens != row.tokens:
                break
            forked = self.blocks.fork(row.blocks, len(row.tokens), reserve=len(self.running))
            if forked is None:
                break
            twin.blocks, copy = forked
            twin.num_computed = len(twin.tokens)
            self.num_cached_tokens += len(twin.tokens)
            self.running.append(self.waiting.popleft())
            forks.append(Fork(row, twin, copy))
        return forks

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
        row.in_flight = 0
        self.blocks.publish(row.tokens, row.blocks, row.num_computed)
        self.blocks.release(row.blocks)
