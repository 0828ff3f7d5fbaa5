"""Decode through captured CUDA graphs: one replay a token for all rows, the host looks only every few tokens.

A graph is captured for each number of rows (rounded up) and kind of sampling, the first time it is needed; all share
one memory pool. It reads the weights where they are: in-place updates are seen, moved storage makes it invalid.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from verl.models.causal_lm import CausalLM
from verl.rollout.base import Request, SamplingParams
from verl.rollout.native.cache import KVCache
from verl.rollout.native.decode import EagerDecoder, advance
from verl.rollout.native.decode_state import DecodeState
from verl.rollout.native.sequence import Sequence

_LOG = logging.getLogger(__name__)
_WARM_UP_STEPS = 2


@dataclass
class _Graph:
    """A captured step on its own state; step i since ``count`` was zeroed writes tokens[i] and log_probs[i]."""

    graph: Any
    state: DecodeState
    count: Tensor
    tokens: Tensor
    log_probs: Tensor


class GraphDecoder:
    """Steps by replaying graphs. A model whose forward can't be captured is decoded without, which is logged.

    steps  tokens that the engine should ask for at once: between them the device never waits for the host
    """

    def __init__(self, model: CausalLM, kv: KVCache) -> None:
        self._model, self._cache = model, kv
        self.steps = 8
        self._graphs: dict[tuple[int, ...], _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call,unused-ignore]
        self._eager: EagerDecoder | None = None

    def reset(self) -> None:
        """Rows advanced by other means: nothing to do, the state is written anew for every call."""

    def decode(self, rows: Rows[Sequence], steps: int) -> tuple[list[list[int]], list[list[float]]]:
        """``steps`` tokens of each row: [steps][B] tokens and log-probs."""
        if self._eager is not None:
            return self._eager.decode(rows, steps)
        padded = [*rows, *[_padding_row()] * (_bucket(len(rows)) - len(rows))]
        state = DecodeState.of(padded, self._model.vocab_size, self._width(rows), torch.device("cpu"))
        graph = self._graph(state)
        if graph is None:
            return self.decode(rows, steps)
        for target, source in zip(graph.state.tensors, state.tensors, strict=True):
            if source.numel():
                target.copy_(source.pin_memory(), non_blocking=True)
        graph.count.zero_()
        for _ in range(steps):
            graph.graph.replay()
        return graph.tokens[:steps, : len(rows)].tolist(), graph.log_probs[:steps, : len(rows)].tolist()

    def _width(self, rows: Rows[Sequence]) -> int:
        """Blocks of the longest row when it is full, rounded up so that few widths need a graph."""
        longest = max(-(-row.max_cached // self._cache.block_size) for row in rows)
        return max(16, 1 << (longest - 1).bit_length())

    def _graph(self, state: DecodeState) -> _Graph | None:
        sampling = state.sampling
        key = (*state.tables.shape, sampling.banned.shape[1], sampling.truncates, sampling.draws)
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture(state)
            except RuntimeError as error:
                _LOG.warning(
                    "decoding %s without CUDA graphs: its forward can't be captured (%s)", self._model.name, error
                )
                self._eager = EagerDecoder(self._model, self._cache, use_kernel=True)
                return None
        return self._graphs[key]

    def _capture(self, like: DecodeState) -> _Graph:
        from verl.rollout.native.triton_decode import KernelAttention

        device, rows = self._cache.device, len(like.tokens)
        state = _on_padding(like, device)
        count = torch.zeros(1, dtype=torch.int64, device=device)
        tokens = torch.zeros(self.steps, rows, dtype=torch.int64, device=device)
        log_probs = torch.zeros(self.steps, rows, dtype=torch.float32, device=device)

        def step() -> None:
            made = advance(self._model, state, KernelAttention(self._cache, state))
            tokens.index_copy_(0, count, made[0][None])
            log_probs.index_copy_(0, count, made[1][None])
            count.add_(1)

        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call,unused-ignore]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_STEPS):
                step()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        return _Graph(graph, state, count, tokens, log_probs)


def _on_padding(like: DecodeState, device: torch.device) -> DecodeState:
    """A state of the same shapes and kind on ``device``, whose rows all sit in the padding block."""
    rows = [_padding_row()] * len(like.tokens)
    state = DecodeState.of(rows, 1, like.tables.shape[1], device)
    sampling = like.sampling
    state.sampling.truncates, state.sampling.draws = sampling.truncates, sampling.draws
    state.sampling.banned = torch.zeros_like(sampling.banned, device=device)
    return state


@cache
def _padding_row() -> Sequence:
    request = Request(prompt_ids=[0], seed=0, sampling=SamplingParams(max_new_tokens=1, temperature=0.0))
    return Sequence(request, [0], frozenset())


def _bucket(rows: int) -> int:
    """The smallest of 1, 2, 4, 6, 8, 12, 16, 24, ... that is at least ``rows``."""
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if power >= 8 and rows <= power * 3 // 4 else power
