"""What ``verl bench rollout`` measures: a model behind its rollout engine, calls of it, and what a call took.

Prompts are random ids and no two calls share one, so nothing is in the engine's cache that a workload didn't put there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from verl.bench.rollout_config import RolloutBench
from verl.common.seeding import derive_seed, seed_everything
from verl.models.causal_lm import CausalLM
from verl.models.loading import compute_dtype, eos_token_ids, load_model, load_tokenizer
from verl.observe.memory import peak_memory_bytes, reset_peak_memory
from verl.rollout import ROLLOUT_ENGINES
from verl.rollout.base import Request, Response, RolloutEngine, RolloutStats
from verl.rollout.config import RolloutConfig
from verl.trainer.inputs import pick_device

_PHASES: tuple[str, ...] = ("prefill_s", "decode_s", "host_frac")
"""What an engine may tell of a call in ``stats.extra``."""


@runtime_checkable
class KnowsItsCache(Protocol):
    """An engine that says how large its cache is."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache's tensors now."""
        ...


@dataclass(frozen=True)
class Subject:
    """A model, the engine that shares its weights, and that engine's keys."""

    lm: CausalLM
    engine: RolloutEngine
    rollout: RolloutConfig
    device: torch.device
    seed: int

    @staticmethod
    def build(config: RolloutBench) -> Subject:
        """The model of ``config``, in the type that training computes in. Raises as loading does."""
        device = pick_device(config.trainer.device)
        seed_everything(config.trainer.seed)
        tokenizer = load_tokenizer(config.model)
        module = load_model(config.model, tokenizer, device, compute_dtype(config.model.amp_dtype, device))
        lm, rollout = CausalLM(module), config.engine_config()
        engine = ROLLOUT_ENGINES.load(rollout.name)(lm, tokenizer, rollout, eos_token_ids(module, tokenizer))
        return Subject(lm, engine, rollout, device, config.trainer.seed)

    def prompts(self, rows: int, prompt_tokens: int, *where: int | str) -> list[list[int]]:
        """``rows`` lists of random ids; ``where``, the call they are for, decides them."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, *where))
        ids: list[list[int]] = torch.randint(self.lm.vocab_size, (rows, prompt_tokens), generator=generator).tolist()
        return ids

    def requests(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], *where: int | str) -> list[Request]:
        """A request a prompt, for a response of exactly the length at its place."""
        return [
            Request(
                prompt_ids=prompt,
                seed=derive_seed(self.seed, *where, i),
                sampling=self.rollout.sampling(max_new_tokens=length, ignore_eos=True),
            )
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]

    def call(self, requests: Sequence[Request]) -> Call:
        """One ``generate``, timed."""
        reset_peak_memory(self.device)
        seconds, responses = self.timed(lambda: self.engine.generate(requests))
        return Call(requests, responses, seconds, self.engine.stats, self._peak_beyond_bytes())

    def timed(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds until the device is done with ``work``, and its result."""
        self._wait()
        started = time.perf_counter()
        result = work()
        self._wait()
        return time.perf_counter() - started, result

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _peak_beyond_bytes(self) -> int | None:
        if self.device.type != "cuda" or not isinstance(self.engine, KnowsItsCache):
            return None
        held = [*self.lm.module.parameters(), *self.lm.module.buffers()]
        weights = sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())
        return peak_memory_bytes(self.device) - weights - self.engine.cache_bytes


@dataclass(frozen=True)
class Call:
    """What one ``generate`` made and took.

    peak_beyond_bytes  most device memory beyond weights and cache; None where that isn't known
    """

    requests: Sequence[Request]
    responses: list[Response]
    seconds: float
    stats: RolloutStats
    peak_beyond_bytes: int | None

    @property
    def tokens(self) -> int:
        """Tokens sampled, those of all responses."""
        return sum(len(response.response_ids) for response in self.responses)

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens a second of the whole call, prompts included."""
        return self.tokens / self.seconds

    def phases(self) -> dict[str, float]:
        """Seconds of the call's phases, as far as the engine tells them."""
        extra, steps = self.stats.extra, self.stats.decode_steps
        found = {name: extra[name] for name in _PHASES if name in extra}
        if "decode_s" in extra and steps:
            found["decode_step_ms"] = extra["decode_s"] / steps * 1000
        if self.peak_beyond_bytes is not None:
            found["peak_beyond_weights_and_cache_bytes"] = float(self.peak_beyond_bytes)
        return found


def call_figures(calls: Sequence[Call]) -> dict[str, Any]:
    """The first of ``calls`` apart, medians over the others, at least one; the spread of their tokens a second."""
    first, *warm = calls
    rates = [call.tokens_per_s for call in warm]
    phases = [call.phases() for call in warm]
    return {
        "tokens": warm[0].tokens,
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_min": min(rates),
        "tokens_per_s_max": max(rates),
        "first_tokens_per_s": first.tokens_per_s,
        "seconds": statistics.median(call.seconds for call in warm),
        "first_s": first.seconds,
        **{name: statistics.median(phase[name] for phase in phases) for name in phases[0]},
        "prefill_tokens": warm[0].stats.prefill_tokens,
        "cached_prompt_tokens": warm[0].stats.cached_prompt_tokens,
        "decode_steps": warm[0].stats.decode_steps,
        "preemptions": warm[0].stats.preemptions,
    }
