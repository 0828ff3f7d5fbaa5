"""Responses in, one result a response out, in order: scores, and failures kept apart from scores.

Functions run in a pool of processes under a time limit; reward models, and what can't leave this process, run here.
Knows nothing of batches, advantages or what is trained.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import cloudpickle

from verl.common.errors import ConfigError, RewardError, UnknownName, WorkerError
from verl.common.waiting import result_of
from verl.rewards import REWARDS
from verl.rewards.base import LoadsFirst, RewardItem, RewardResult, ScoresItems, as_result, failed
from verl.rewards.calling import FileFunction, ModuleFunction, bind, describe, find
from verl.rewards.config import RewardConfig
from verl.rewards.pool import WorkerPool
from verl.rewards.shipping import Given, ship

Source = FileFunction | ModuleFunction | Given
CACHE_SIZE = 65_536
logger = logging.getLogger("verl.rewards")


@dataclass
class RewardCounts:
    """What happened since the runner was made; cached results count as scored."""

    scored: int = 0
    timeouts: int = 0
    errors: int = 0
    invalid: int = 0


class RewardRunner:
    """Scores items with one reward.

    reward  a callable; a name from REWARDS, "file.py:function" or "package.module:function"; a RewardConfig that has
            one of those; or a reward model (anything with ``score_items``)
    config  time limit, workers, what failures do; not needed where ``reward`` is a RewardConfig

    needs   the fields of an item that the function can't be called without, by name; known once the workers run

    Usable from any thread, and a context manager. Raises ConfigError when no reward, or more than one, is given.
    """

    def __init__(
        self, reward: Callable[..., Any] | str | RewardConfig | ScoresItems | None, config: RewardConfig | None = None
    ) -> None:
        if isinstance(reward, RewardConfig):
            if config not in (None, reward):
                raise ConfigError("the reward is a RewardConfig already: don't give another one")
            reward, config = None, reward
        self.config = config or RewardConfig()
        self.counts = RewardCounts()
        self.needs: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._cache: OrderedDict[bytes, RewardResult] = OrderedDict()
        self._executor: ThreadPoolExecutor | None = None
        self._pool: WorkerPool | None = None
        self._score_here: Callable[[Sequence[RewardItem]], list[RewardResult]]
        reward = _only_one(reward, self.config)
        self._model = reward if isinstance(reward, ScoresItems) else None
        if isinstance(reward, ScoresItems):
            self._score_here = lambda items: _score_with_model(reward, items)
        else:
            self._prepare(_source(reward))

    def start(self) -> None:
        """Start the workers, or load a model that isn't yet, now rather than at the first item.

        Raises ConfigError when the function can't be loaded.
        """
        self.start_workers()
        if isinstance(self._model, LoadsFirst):
            self._model.load()

    def start_workers(self) -> None:
        """``start`` without loading a model: what finds out whether the function can be loaded."""
        if self._pool is not None:
            self.needs = self._pool.start()

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """One result an item, in order.

        Raises RewardError on the first failure where the key on_failure is "raise", ConfigError when the function
        can't be loaded.
        """
        items = list(items)
        results = self._score_here(items) if self._pool is None else self._score_in_pool(self._pool, items)
        self._count(results)
        bad = [i for i, result in enumerate(results) if result.failure is not None]
        for i in bad[:3]:
            logger.warning("reward %s for item %d of %d: %s", results[i].failure, i, len(items), results[i].detail)
        if bad and self.config.on_failure == "raise":
            raise RewardError(f"reward {results[bad[0]].failure} for item {bad[0]}: {results[bad[0]].detail}")
        if self.config.on_failure == "zero":
            results = [result if result.failure is None else replace(result, score=0.0) for result in results]
        return results

    def score_async(self, items: Sequence[RewardItem]) -> Future[list[RewardResult]]:
        """``score`` in the background."""
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(max_workers=4, thread_name_prefix="verl-rewards")
            return self._executor.submit(self.score, items)

    def close(self) -> None:
        """End the workers, and with them what they are at. May be called twice."""
        if self._pool is not None:
            self._pool.close()
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self, source: Source) -> None:
        """Make a pool for ``source``, or arrange to call it in this process."""
        shipped = ship(source) if self.config.workers else None
        if isinstance(shipped, bytes):
            self._pool = WorkerPool(shipped, self.config.kwargs, self.config.workers, self.config.timeout_s)
            return
        if shipped is not None:
            logger.warning("the reward runs in this process, without time limits: %s", shipped)
        call = bind(source.load(), self.config.kwargs)
        self.needs = call.needs

        def one(item: RewardItem) -> RewardResult:
            try:
                return as_result(call(item.fields()))
            except (Exception, SystemExit) as error:  # user code
                return failed("error", describe(error))

        self._score_here = lambda items: [one(item) for item in items]

    def _score_in_pool(self, pool: WorkerPool, items: list[RewardItem]) -> list[RewardResult]:
        waiting: list[tuple[bytes, Future[RewardResult]]] = []
        try:
            for item in items:
                waiting.append(self._submit(pool, item))
            results = [result_of(future) for _, future in waiting]
        except BaseException:
            for _, future in waiting:
                future.cancel()
            raise
        if self.config.cache:
            with self._lock:
                self._cache.update((key, r) for (key, _), r in zip(waiting, results, strict=True) if r.failure is None)
                while len(self._cache) > CACHE_SIZE:
                    self._cache.popitem(last=False)
        return results

    def _submit(self, pool: WorkerPool, item: RewardItem) -> tuple[bytes, Future[RewardResult]]:
        """The item's fields, pickled, and its result to be: from the cache, where it has it."""
        done: Future[RewardResult] = Future()
        try:
            fields = cloudpickle.dumps(item.fields())
        except Exception as error:  # whatever a row's object raises when it is pickled
            done.set_result(failed("error", f"the row can't be sent to a reward process: {describe(error)}"))
            return b"", done
        with self._lock:
            known = self._cache.get(fields)
            if known is None:
                return fields, pool.submit(fields)
            self._cache.move_to_end(fields)
        done.set_result(known)
        return fields, done

    def _count(self, results: list[RewardResult]) -> None:
        with self._lock:
            for result in results:
                self.counts.scored += result.failure is None
                self.counts.timeouts += result.failure == "timeout"
                self.counts.errors += result.failure == "error"
                self.counts.invalid += result.failure == "invalid"


def _only_one(reward: Any, config: RewardConfig) -> Any:
    """The reward that was given: in Python, by name or by function."""
    given = [x for x in (reward, config.name, config.function) if x is not None]
    if len(given) != 1:
        raise ConfigError(
            "a run has one reward: set one of the keys 'name', 'function' and 'model', or pass a callable; "
            f"got {given if given else 'none'}"
        )
    return given[0]


def _source(reward: Any) -> Source:
    """Where the function comes from. Raises UnknownName for text that is neither a name nor a function's place,
    ConfigError for what is neither text nor a function."""
    if callable(reward):
        return Given(reward)
    if not isinstance(reward, str):
        raise ConfigError(
            "a reward is a function (prompt, response, ground_truth, **row) -> float, a class of such, a reward model "
            f"or text ({', '.join(sorted(REWARDS))}, 'file.py:function', 'module:function'), got "
            f"{type(reward).__name__} {reward!r}"
        )
    if ":" not in reward and reward not in REWARDS:
        raise UnknownName("reward", reward, REWARDS)
    return find(REWARDS.get(reward, reward))


def _score_with_model(model: ScoresItems, items: Sequence[RewardItem]) -> list[RewardResult]:
    try:
        values = list(model.score_items(items)) if items else []
    except (ConfigError, WorkerError):
        raise
    except Exception as error:  # a user's model: the rows fail, the run doesn't
        return [failed("error", describe(error)) for _ in items]
    if len(values) != len(items):
        return [failed("invalid", f"the reward model gave {len(values)} scores for {len(items)} items")] * len(items)
    return [as_result(value) for value in values]
