"""The workloads of ``verl bench rollout``: each makes its calls and returns its figures by name.

``fixed``, ``spread`` and ``group`` sample responses; ``update`` and ``sleep`` time what happens between calls.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from verl.bench.rollout_config import SHORTEST, Fixed, Group, RolloutBench, Sleep, Spread, Update
from verl.bench.subject import Call, Subject, call_figures
from verl.common.seeding import derive_seed
from verl.rollout.base import Request


@dataclass(frozen=True)
class Measured:
    """A workload's figures, and the calls that its tokens a second are of, the first among them."""

    figures: dict[str, Any]
    calls: list[Call] = field(default_factory=list)


def fixed(subject: Subject, work: Fixed, repeats: int) -> Measured:
    """Prompts of one length, responses of one length."""
    return _own_prompts(subject, work, [work.new_tokens] * work.rows, repeats, "fixed")


def spread(subject: Subject, work: Spread, repeats: int) -> Measured:
    """Responses of lengths uniform in [32, 4 x new_tokens], the same in every call."""
    generator = random.Random(derive_seed(subject.seed, "spread"))
    lengths = [generator.randint(SHORTEST, 4 * work.new_tokens) for _ in range(work.rows)]
    return _own_prompts(subject, work, lengths, repeats, "spread")


def group(subject: Subject, work: Group, repeats: int) -> Measured:
    """``group_size`` responses to each long prompt, against prompts computed once and rows decoded without them.

    ``ratio`` is 1 where sharing is whole: seconds of the call, to those of the prompts alone (one token each) and
    those of decoding all rows (the engine's own ``decode_s`` or, where it tells none, the same prompts again, cached).
    """
    calls, rows = [], work.rows * work.group_size
    parts: dict[str, list[float]] = {"prompts_once_s": [], "alone_s": [], "decode_all_s": []}
    for turn in range(repeats + 1):
        prompts = subject.prompts(work.rows, work.prompt_tokens, "group", turn)
        everyone = [prompt for prompt in prompts for _ in range(work.group_size)]
        requests = subject.requests(everyone, [work.new_tokens] * rows, "group", turn)
        calls.append(subject.call(requests))
        cached = subject.call(requests).seconds
        parts["decode_all_s"].append(calls[-1].phases().get("decode_s", cached))
        for name, length in (("prompts_once_s", 1), ("alone_s", work.new_tokens)):
            others = subject.prompts(work.rows, work.prompt_tokens, "group", turn, name)
            alone = subject.requests(others, [length] * work.rows, "group", turn, name)
            parts[name].append(subject.call(alone).seconds)
    medians = {name: statistics.median(values[1:]) for name, values in parts.items()}
    figures = {**work.model_dump(), **call_figures(calls), **medians}
    figures["ratio"] = figures["seconds"] / (medians["prompts_once_s"] + medians["decode_all_s"])
    figures["ratio_to_alone"] = figures["seconds"] / medians["alone_s"]
    return Measured(figures, calls)


def update(subject: Subject, work: Update, repeats: int) -> Measured:
    """From weights changed in place to the next token, beside the same call without a change."""
    with_ms, without_ms = [], []
    for turn in range(repeats + 1):
        plain, changed = (_one_length(subject, work, "update", turn, which) for which in ("without", "with"))
        without_ms.append(subject.call(plain).seconds * 1000)
        _change_weights(subject)
        announce = partial(subject.engine.weights_changed, subject.engine.policy_version + 1)
        announced, _ = subject.timed(announce)
        with_ms.append((announced + subject.call(changed).seconds) * 1000)
    figures = {
        "with_update_ms": statistics.median(with_ms[1:]),
        "without_update_ms": statistics.median(without_ms[1:]),
    }
    figures["update_ms"] = figures["with_update_ms"] - figures["without_update_ms"]
    return Measured({**work.model_dump(), **figures})


def sleep(subject: Subject, work: Sleep, repeats: int) -> Measured:
    """The engine put to sleep and woken; then its first call, beside one without sleep."""
    found: dict[str, list[float]] = {"sleep_s": [], "wake_s": [], "first_call_s": [], "warm_call_s": []}
    given_back = []
    subject.call(_one_length(subject, work, "sleep"))
    for turn in range(repeats):
        found["warm_call_s"].append(subject.call(_one_length(subject, work, "sleep", turn, "warm")).seconds)
        before = _free_bytes(subject.device)
        found["sleep_s"].append(subject.timed(subject.engine.sleep)[0])
        given_back.append(_free_bytes(subject.device) - before)
        found["wake_s"].append(subject.timed(subject.engine.wake)[0])
        found["first_call_s"].append(subject.call(_one_length(subject, work, "sleep", turn, "first")).seconds)
    figures: dict[str, Any] = {name: statistics.median(values) for name, values in found.items()}
    if subject.device.type == "cuda":
        figures["given_back_bytes"] = statistics.median(given_back)
    return Measured({**work.model_dump(), **figures})


WORKLOADS: dict[str, Callable[[Subject, RolloutBench, int], Measured]] = {
    "fixed": lambda subject, config, repeats: fixed(subject, config.fixed, repeats),
    "spread": lambda subject, config, repeats: spread(subject, config.spread, repeats),
    "group": lambda subject, config, repeats: group(subject, config.group, repeats),
    "update": lambda subject, config, repeats: update(subject, config.update, repeats),
    "sleep": lambda subject, config, repeats: sleep(subject, config.sleep, repeats),
}
SAMPLING = ("fixed", "spread", "group")
"""Workloads whose figures are of sampled responses."""


def _own_prompts(subject: Subject, work: Fixed | Spread, lengths: list[int], repeats: int, name: str) -> Measured:
    """One call for each of ``repeats`` + 1 sets of prompts."""
    calls = []
    for turn in range(repeats + 1):
        prompts = subject.prompts(work.rows, work.prompt_tokens, name, turn)
        calls.append(subject.call(subject.requests(prompts, lengths, name, turn)))
    return Measured({**work.model_dump(), **call_figures(calls)}, calls)


def _one_length(subject: Subject, work: Update | Sleep, *where: int | str) -> list[Request]:
    prompts = subject.prompts(work.rows, work.prompt_tokens, *where)
    return subject.requests(prompts, [work.new_tokens] * work.rows, *where)


def _change_weights(subject: Subject) -> None:
    """Write every parameter in place, as an optimizer's step does; the values stay."""
    with torch.no_grad():
        for parameter in subject.lm.module.parameters():
            parameter.mul_(1)


def _free_bytes(device: torch.device) -> int:
    """Memory that other programs could take, after what torch holds unused was given back; 0 on the CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])
