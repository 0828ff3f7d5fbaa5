"""Speed and memory of a rollout engine on synthetic work: ``verl bench rollout``.

Random weights, random prompts, responses of lengths that are asked for; the engine is the one that training uses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from verl.bench.beside import PEERS
from verl.bench.log_probs import log_prob_difference
from verl.bench.rollout_config import RolloutBench
from verl.bench.setting import machine_setting
from verl.bench.subject import Subject
from verl.bench.workloads import SAMPLING, WORKLOADS, Measured
from verl.common.errors import ConfigError, UnknownName


def measure_rollout(
    overrides: Sequence[str],
    *,
    workloads: Sequence[str] = (),
    repeats: int = 3,
    beside: str | None = None,
    log_probs: bool = False,
) -> dict[str, Any]:
    """The figures of each of ``workloads`` by its name and, under ``setting``, what was run on what.

    overrides  ``key.path=value`` words over the small default model, such as fixed.rows=256
    workloads  names of ``WORKLOADS``; none: all of them
    repeats    warm calls that medians are of, after a first one
    beside     a name of ``PEERS`` that does the same work on the same weights
    log_probs  compare the engine's log-probs with those of the training forward pass
    Raises ConfigError for anything wrong before a model is loaded, where it can be known by then.
    """
    names = list(dict.fromkeys(workloads)) or list(WORKLOADS)
    _check(names, repeats, beside, log_probs)
    config = RolloutBench.read(overrides)
    subject = Subject.build(config)
    found: dict[str, Any] = {"setting": _setting(subject, repeats)}
    measured: dict[str, Measured] = {}
    with _quiet_engine():
        for name in names:
            subject.engine.sleep()  # so that every workload's first call takes the cache anew
            measured[name] = WORKLOADS[name](subject, config, repeats)
            found[name] = measured[name].figures
            if log_probs and name in SAMPLING:
                found[name]["log_prob_diff"] = log_prob_difference(subject, measured[name].calls[-1])
    if beside is not None:
        subject.engine.sleep()
        peer = PEERS[beside](subject)
        for name in names:
            if name in SAMPLING:
                found[name][beside] = peer.figures(measured[name].calls)
    return found


def _check(names: Sequence[str], repeats: int, beside: str | None, log_probs: bool) -> None:
    for name in names:
        if name not in WORKLOADS:
            raise UnknownName("workload", name, WORKLOADS)
    if repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, got {repeats}")
    if beside is not None and beside not in PEERS:
        raise UnknownName("sampler for --beside", beside, PEERS)
    asked = [word for word, is_given in (("--beside", beside is not None), ("--log-probs", log_probs)) if is_given]
    if asked and not set(names) & set(SAMPLING):
        raise ConfigError(
            f"{' and '.join(asked)} has nothing to compare in --workload {', '.join(names)}: add one of "
            f"{', '.join(SAMPLING)}"
        )


def _setting(subject: Subject, repeats: int) -> dict[str, Any]:
    return {
        **machine_setting(subject.device, subject.lm.module),
        "dtype": str(subject.lm.module.dtype).removeprefix("torch."),
        "engine": subject.rollout.name,
        "temperature": subject.rollout.temperature,
        "repeats": repeats,
    }


@contextmanager
def _quiet_engine() -> Iterator[None]:
    """Engines log every new sampling setting, and here each length is one."""
    logger = logging.getLogger("verl.rollout")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
