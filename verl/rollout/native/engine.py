"""The native rollout engine: scheduler, block manager, runner and sampler joined around the module that trains.

It shares the module's weights; there is no second copy. It knows token ids, sampling settings and a weight version,
nothing of rewards, groups or training. Nothing is read from a model folder's generation_config.json.
"""

from __future__ import annotations

import collections.abc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from verl.batch import FinishReason
from verl.common.errors import ConfigError, NotFinite, VerlError
from verl.models.causal_lm import CausalLM
from verl.rollout.base import Request, Response, RolloutStats, SamplingParams
from verl.rollout.native.block_manager import BlockManager
from verl.rollout.native.cache import KVCache, affordable_tokens, layer_shapes
from verl.rollout.native.config import Config as NativeConfig
from verl.rollout.native.pending import Pending
from verl.rollout.native.request_checks import RequestChecks
from verl.rollout.native.runner import Runner
from verl.rollout.native.scheduler import Scheduler
from verl.rollout.native.sequence import Sequence
from verl.rollout.native.stop_strings import StopStrings
from verl.rollout.native.weights import Weights

_LOG = logging.getLogger(__name__)
_LEAST_WIDTH = 4096  # tokens that a row's table has room for at least: graphs are made for one width
_LEAST_GROWTH = 1.25  # a cache that is taken anew forgets its prefixes: not for less than this, while all rows fit


class NativeEngine:
    """Continuous batching over a paged cache, on the device where ``model`` is. One call at a time.

    tokenizer      decodes responses for stop strings; None if there are none
    eos_token_ids  ids that end a response unless it ignores them
    """

    Config = NativeConfig

    def __init__(
        self, model: CausalLM, tokenizer: Any | None, config: NativeConfig, eos_token_ids: Iterable[int]
    ) -> None:
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self._eos_ids = frozenset(int(i) for i in eos_token_ids)
        self._checks = RequestChecks(model)
        self._weights = Weights(model.module)
        self._logged: set[SamplingParams] = set()
        self._device = next(model.module.parameters()).device
        self._under_way = threading.Lock()
        with self._generating():
            self._shapes = layer_shapes(model, self._device)
        self._cache = KVCache(self._shapes, 0, config.block_size, self._device)
        self._blocks = 0  # of the cache when it was last awake
        self._scheduler: Scheduler | None = None  # None while it sleeps
        self._runner: Runner | None = None  # outlives sleep, and with it the graphs
        self.policy_version = 0
        self.stats = RolloutStats()
        if config.stop:
            StopStrings(tokenizer, config.stop)  # says now, not at the first call, that a tokenizer is missing

    def generate(
        self, requests: collections.abc.Sequence[Request], *, should_pause: Callable[[], bool] | None = None
    ) -> list[Response]:
        """One response a request, in order; wakes the engine if it sleeps.

        should_pause  asked every few tokens; once True, what is under way ends at the token that it has, as ABORT,
                      and may be resumed by another call, after an update of the weights too

        Raises, before any work: DataError for a prompt that is empty or has ids outside the vocabulary, ConfigError
        for a request that can't fit the model's positions or the cache, StaleWeights when the weights were changed
        and nobody said so, VerlError while another call is under way. Raises NotFinite when the model's outputs aren't
        numbers.
        """
        self._check_idle()
        with self._under_way:
            self._weights.check_fresh(self.policy_version)
            rows = [self._row(i, request) for i, request in enumerate(requests)]
            self._log_settings(requests)
            self.stats = RolloutStats()
            if rows:
                with self._generating():
                    self._run(rows, *self._awake(rows), should_pause)
            return [self._response(row) for row in rows]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy ``weights`` into the module by parameter name and take ``version``.

        Raises ConfigError for an unknown name, ShapeError for another shape, StaleWeights when parameters are
        missing; after any of these, generating raises StaleWeights until a load ends well.
        """
        self._check_idle()
        self._weights.load(weights)
        self.weights_changed(version)

    def weights_changed(self, version: int) -> None:
        """The module's weights were updated in place: drop what was cached under the old ones, take ``version``."""
        self._check_idle()
        if self._scheduler is not None:
            self._scheduler.blocks.forget()
        self._weights.accept()
        self.policy_version = version

    def sleep(self) -> None:
        """Give back the cache's memory, and with it the cached prefixes; captured graphs stay."""
        self._check_idle()
        self._give_back()

    def wake(self) -> None:
        """Take the cache's memory again, as much as before; before a first call only if cache_tokens is set."""
        self._check_idle()
        blocks = self._configured_blocks or self._blocks
        if self._scheduler is None and blocks:
            with self._generating():
                self._take_cache(blocks)

    @property
    def cache_bytes(self) -> int:
        """Memory that the cache holds now."""
        return self._cache.num_bytes

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, holders and rows agree; between calls no row holds a block."""
        if self._scheduler is not None:
            self._scheduler.check_integrity()

    @property
    def _configured_blocks(self) -> int | None:
        tokens = self._config.cache_tokens
        return None if tokens is None else tokens // self._config.block_size

    def _check_idle(self) -> None:
        if self._under_way.locked():
            raise VerlError(
                "generate is under way in this engine, which does one thing at a time: let that call end (its "
                "should_pause ends it early) before the engine generates again, takes weights, sleeps or wakes"
            )

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """On the model's device, in evaluation mode, without gradients, whatever modes the caller is in.

        Every submodule's own mode comes back after.
        """
        module, device = self._model.module, self._device
        training = [part for part in module.modules() if part.training]
        module.eval()
        try:
            with (
                torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
                torch.inference_mode(False),
                torch.autocast(device.type, enabled=False),
                torch.no_grad(),
            ):
                yield
        finally:
            for part in training:
                part.training = True

    def _row(self, index: int, request: Request) -> Sequence:
        prompt = self._checks.prompt(index, request)
        sampling = request.sampling
        stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos_ids)
        strings = StopStrings(self._tokenizer, sampling.stop) if sampling.stop else None
        return Sequence(request, prompt, stop_ids, strings)

    def _log_settings(self, requests: Iterable[Request]) -> None:
        for sampling in {request.sampling: None for request in requests}:
            if sampling not in self._logged:
                self._logged.add(sampling)
                _LOG.info("sampling with %s; end-of-sequence ids %s", sampling, sorted(self._eos_ids))

    def _awake(self, rows: list[Sequence]) -> tuple[Scheduler, Runner]:
        """Scheduler and runner over a cache in which each row alone fits and, memory allowing, all that may run do."""
        size = self._config.block_size
        needs = sorted((-(-row.max_cached // size) for row in rows), reverse=True)
        blocks = self._configured_blocks
        if blocks is None:
            wanted = sum(needs[: self._config.max_running_rows])
            blocks = self._blocks if wanted <= self._blocks else self._grown(wanted, needs[0])
        if needs[0] > blocks:
            row = max(rows, key=lambda row: row.max_cached)
            raise ConfigError(
                f"a prompt of {row.num_prompt} tokens with max_new_tokens {row.request.sampling.max_new_tokens} "
                f"needs {needs[0]} cache blocks of {size} tokens and the cache has {blocks}: raise cache_tokens "
                f"({self._config.cache_tokens}) or memory_frac ({self._config.memory_frac}), or lower "
                "max_response_tokens or the prompt limit"
            )
        if self._scheduler is None or self._blocks != blocks:
            self._take_cache(blocks)
        runner = self._runner_for(needs[0], max(len(row.stop_ids) for row in rows))
        assert self._scheduler is not None
        return self._scheduler, runner

    def _grown(self, wanted: int, least: int) -> int:
        """Blocks for ``wanted``, rounded up, within memory_frac; as many as there are, if these are nearly as many.

        least  blocks of the longest row
        """
        frac, held = self._config.memory_frac, self._cache.num_bytes
        budget = affordable_tokens(self._shapes, self._device, frac, held_bytes=held) // self._config.block_size
        blocks = min(1 << (wanted - 1).bit_length(), budget)
        if self._scheduler is not None and least <= self._blocks and blocks < _LEAST_GROWTH * self._blocks:
            return self._blocks
        self._give_back()
        return blocks

    def _give_back(self) -> None:
        self._scheduler = None
        self._cache.release()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _take_cache(self, blocks: int) -> None:
        self._cache.take(blocks)
        self._blocks = blocks
        config = self._config
        self._scheduler = Scheduler(
            BlockManager(blocks, config.block_size, share=config.prefix_cache),
            max_running_rows=config.max_running_rows,
            max_prefill_tokens=config.max_prefill_tokens,
        )
        if self._runner is not None:
            self._runner.cache_moved()

    def _runner_for(self, width: int, stop_ids: int) -> Runner:
        """The runner, made anew, without graphs, only if rows are wider than before or the weights were moved."""
        assert self._scheduler is not None
        runner, has_moved = self._runner, self._weights.moved()
        if has_moved:
            self._scheduler.blocks.forget()  # other storage may hold other weights, which no version counter tells
        if runner is None or runner.width < width or runner.stop_ids < stop_ids or has_moved:
            least = -(-_LEAST_WIDTH // self._config.block_size)
            self._runner = None  # if making one fails, graphs of weights that are gone must not be used again
            self._runner = runner = Runner(
                self._model,
                self._cache,
                self._shapes,
                max_rows=self._config.max_running_rows,
                stop_ids=max(stop_ids, 1),
                width=max(least, 1 << (width - 1).bit_length()),
                use_cuda_graph=self._config.use_cuda_graph,
            )
            self._weights.moved()  # making it may have laid weights side by side
        return runner

    def _run(
        self, rows: list[Sequence], scheduler: Scheduler, runner: Runner, should_pause: Callable[[], bool] | None
    ) -> None:
        started, stats = time.perf_counter(), self.stats
        scheduler.num_preemptions = scheduler.num_cached_tokens = 0
        had = sum(row.num_response for row in rows)
        scheduler.add(rows)
        try:
            self._until_done(scheduler, runner, should_pause)
        except BaseException:
            self._give_back()  # it may hold what isn't a number, and rows that nobody waits for
            raise
        elapsed = time.perf_counter() - started
        made = sum(row.num_response for row in rows) - had
        stats.preemptions, stats.cached_prompt_tokens = scheduler.num_preemptions, scheduler.num_cached_tokens
        stats.extra |= {"response_tokens": made, "generate_s": elapsed, "response_tokens_per_s": made / elapsed}
        launched = stats.extra.get("prefill_s", 0.0) + stats.extra.get("decode_s", 0.0)
        stats.extra["host_frac"] = max(0.0, 1 - launched / elapsed)

    def _until_done(self, scheduler: Scheduler, runner: Runner, should_pause: Callable[[], bool] | None) -> None:
        """Launch steps and take their results, one launch behind: the host works while the device does."""
        pending: deque[Pending] = deque()
        while scheduler.has_work and not (should_pause is not None and should_pause()):
            launched = self._launch(scheduler, runner)
            if launched is not None:
                pending.append(launched)
            while len(pending) > (runner.launches_ahead if launched is not None else 0):
                self._take(pending.popleft(), scheduler)
        while pending:
            self._take(pending.popleft(), scheduler)
        scheduler.stop_all()

    def _launch(self, scheduler: Scheduler, runner: Runner) -> Pending | None:
        """The next step; None when it takes results that are on their way to know it."""
        work = scheduler.prefill()
        if work.chunks:
            self.stats.prefill_tokens += sum(chunk.end - chunk.start for chunk in work.chunks)
            return runner.prefill(work)
        planned = scheduler.decode(runner.steps)
        if planned is None:
            return None
        rows, steps = planned
        self.stats.decode_steps += steps
        return runner.decode(rows, steps)

    def _take(self, pending: Pending, scheduler: Scheduler) -> None:
        """Give rows their tokens, as far as their ends, and let those that ended go."""
        tokens, log_probs = pending.result()
        kind = f"{pending.kind}_s"
        self.stats.extra[kind] = self.stats.extra.get(kind, 0.0) + pending.seconds
        counts = (tokens >= 0).sum(0).tolist()
        if bool(log_probs.isnan().any()):
            raise self._not_finite(pending.rows[int(log_probs.isnan().any(0).nonzero()[0])])
        for row, made, probs, count in zip(pending.rows, tokens.T.tolist(), log_probs.T.tolist(), counts, strict=True):
            if row.finish_reason is None:
                row.in_flight -= pending.steps
                row.take(made[:count], probs[:count], self.policy_version)
        scheduler.drop_finished()

    @staticmethod
    def _not_finite(row: Sequence) -> NotFinite:
        return NotFinite(
            f"a token of a response to a prompt of {row.num_prompt} tokens, behind its first {row.num_response}, has "
            "the log-prob nan: the model's weights or outputs are not finite numbers. At the first step it is the "
            "weights of model.path that are damaged"
        )

    def _response(self, row: Sequence) -> Response:
        return Response(
            response_ids=row.tokens[row.num_prompt :],
            log_probs=row.log_probs,
            finish_reason=FinishReason.ABORT if row.finish_reason is None else row.finish_reason,
            policy_version=min(row.versions, default=self.policy_version),
            policy_versions=row.versions,
        )
