"""Scheduled rows through the model: their tensors, their slots in the device's state, the launching of steps.

Knows the model and the cache; which rows run and where their blocks lie is decided before. Nothing here waits for
the device: results come as ``Pending``. Shape letters: N tokens, n rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from verl.models.causal_lm import CausalLM
from verl.rollout.native.advance import Outputs
from verl.rollout.native.cache import KVCache, LayerShape
from verl.rollout.native.decode import TorchStep
from verl.rollout.native.graph import EagerSteps
from verl.rollout.native.paged_attention import GatherAttention, VarlenAttention
from verl.rollout.native.pending import Clock, Pending, to_device
from verl.rollout.native.row_state import RowState
from verl.rollout.native.sampler import truncates
from verl.rollout.native.scheduler import Chunk, Fork, Prefill
from verl.rollout.native.sequence import Sequence


class Runner:
    """Runs prompts and decode steps of one model over one cache.

    max_rows  rows that run at the same time at most
    stop_ids  stop ids of a row at most
    width     blocks of a row at most
    """

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        shapes: dict[int, LayerShape],
        *,
        max_rows: int,
        stop_ids: int,
        width: int,
        use_cuda_graph: bool,
    ) -> None:
        self._model, self._cache, self._device = model, cache, cache.device
        on_cuda = self._device.type == "cuda"
        halves = all(s.dtype in (torch.bfloat16, torch.float16) and not s.has_softcap for s in shapes.values())
        self._use_varlen = on_cuda and halves
        self.stop_ids, self.width = stop_ids, width
        self._state = RowState.empty(max_rows, stop_ids, width, self._device)
        self._clock = Clock(self._device)
        if on_cuda:
            from verl.rollout.native.graph import GraphSteps
            from verl.rollout.native.kernel_step import KernelStep

            self._step: TorchStep | KernelStep = KernelStep(model, cache, shapes)
            if use_cuda_graph:
                self._steps: EagerSteps | GraphSteps = GraphSteps(self._step, self._state, model.name)
            else:
                self._steps = EagerSteps(self._step, self._state)
        else:
            self._step = TorchStep(model, cache)
            self._steps = EagerSteps(self._step, self._state)
        self._rows: list[Sequence] = []  # by slot
        self._placed: list[int] = []  # blocks of each that its table on the device has

    @property
    def steps(self) -> int:
        """Tokens a row that one ``decode`` should make."""
        return self._steps.most

    @property
    def launches_ahead(self) -> int:
        """Steps to launch before the results of an earlier one are taken."""
        return 1 if self._device.type == "cuda" else 0

    def cache_moved(self) -> None:
        """The cache's memory was taken anew: no row has blocks in it, not even one that an error left in its slot."""
        self._rows, self._placed = [], []
        self._state.clear(0, self._state.num_slots)
        self._state.tables.zero_()  # a smaller cache lacks blocks that the larger one had
        self._step.cache_moved()

    def prefill(self, work: Prefill) -> Pending:
        """Compute the chunks' tokens, then sample one for each row that is whole; those rows get slots."""
        start, entering = self._clock.now(), work.sampled
        self._arrange(self._still_running(entering))
        hidden, ends = self._forward(work.chunks)
        self._copy_blocks(work.forks)
        out = Outputs.empty(1, len(entering), self._device)
        if entering:
            there = RowState.of(entering, self._model.vocab_size, stop_ids=self.stop_ids)
            rows = RowState(*(to_device(t, self._device) for t in (there.columns, there.stop_ids, there.tables)))
            whole = [c.sequence for c in work.chunks if c.is_last] + [fork.source for fork in work.forks]
            last = self._send([ends[id(row)] for row in whole])
            self._step.sample(hidden[last], rows, out, truncates(entering))
            first = len(self._rows)
            self._state.put(torch.arange(first, first + len(entering), device=self._device), rows)
            self._rows += entering
            self._placed += [len(row.blocks) for row in entering]
        return Pending("prefill", entering, out, self._clock, start)

    def decode(self, rows: Rows[Sequence], steps: int) -> Pending:
        """``steps`` tokens of each row, at most ``self.steps``; their blocks must be there."""
        start = self._clock.now()
        self._arrange(rows)
        self._place_blocks()
        out = self._steps.run(len(rows), steps, truncates(rows))
        return Pending("decode", self._rows, out, self._clock, start)

    def _still_running(self, entering: Rows[Sequence]) -> list[Sequence]:
        """Rows of the slots that go on; one that was preempted meanwhile may be among those that enter anew."""
        new = {id(row) for row in entering}
        return [r for r in self._rows if r.blocks and r.finish_reason is None and r.remaining > 0 and id(r) not in new]

    def _arrange(self, rows: Rows[Sequence]) -> None:
        """Let ``rows``, all of which have slots, fill the first slots without holes; nothing runs behind them."""
        wanted, held, count = {id(row) for row in rows}, len(self._rows), len(rows)
        holes = [i for i, row in enumerate(self._rows[:count]) if id(row) not in wanted]
        movers = [i for i in range(count, held) if id(self._rows[i]) in wanted]
        assert len(holes) == len(movers), "a row runs that has no slot"
        if movers:
            self._state.put(self._send(holes), self._state.at(self._send(movers)))
            for hole, mover in zip(holes, movers, strict=True):
                self._rows[hole], self._placed[hole] = self._rows[mover], self._placed[mover]
        if held > count:
            self._state.clear(count, held)
            del self._rows[count:], self._placed[count:]

    def _place_blocks(self) -> None:
        """Bring the tables on the device up to the rows' blocks."""
        fresh: list[tuple[int, int, int]] = []
        for slot, row in enumerate(self._rows):
            if len(row.blocks) > self._placed[slot]:
                fresh += [(slot, i, row.blocks[i]) for i in range(self._placed[slot], len(row.blocks))]
                self._placed[slot] = len(row.blocks)
        if fresh:
            slots, places, blocks = self._send(fresh).unbind(1)
            self._state.tables.index_put_((slots, places), blocks.int())

    def _forward(self, chunks: Rows[Chunk]) -> tuple[Tensor, dict[int, int]]:
        """Last hidden states [N, C] of the chunks' tokens, and where in them each whole row ends, by the row's id."""
        tokens = [token for c in chunks for token in c.sequence.tokens[c.start : c.end]]
        positions = [position for c in chunks for position in range(c.start, c.end)]
        hidden = self._step.hidden(self._send(tokens), self._send(positions), self._attention(chunks))
        ends, end = {}, 0
        for chunk in chunks:
            end += chunk.end - chunk.start
            ends[id(chunk.sequence)] = end - 1
        return hidden, ends

    def _copy_blocks(self, forks: Rows[Fork]) -> None:
        copies = [fork.copy for fork in forks if fork.copy is not None]
        if copies:
            self._cache.copy_blocks(*self._send(copies).unbind(1))

    def _attention(self, chunks: Rows[Chunk]) -> GatherAttention | VarlenAttention:
        starts, queries = [c.start for c in chunks], [c.end - c.start for c in chunks]
        slots = self._slots([(c.sequence, c.start, c.end) for c in chunks])
        if self._use_varlen:
            key_slots = self._slots([(c.sequence, 0, c.end) for c in chunks]) if any(starts) else None
            return VarlenAttention(self._cache, slots, key_slots, starts, queries)
        width = max(len(c.sequence.blocks) for c in chunks)
        tables = [[*c.sequence.blocks, *[0] * (width - len(c.sequence.blocks))] for c in chunks]
        return GatherAttention(self._cache, slots, self._send(tables), starts, queries)

    def _slots(self, spans: list[tuple[Sequence, int, int]]) -> Tensor:
        """[N] int64: the slot of each token from start to end of each row."""
        size = self._cache.block_size
        parts = []
        for row, start, end in spans:
            blocks = torch.tensor(row.blocks[start // size : -(-end // size)])
            slots = (blocks[:, None] * size + torch.arange(size)).flatten()
            first = start // size * size
            parts.append(slots[start - first : end - first])
        return to_device(torch.cat(parts), self._device)

    def _send(self, values: Rows[int] | Rows[Rows[int]]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), self._device)
