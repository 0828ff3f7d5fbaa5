"""reasoning-gym tasks by name: endless questions with answers that a program can check.

In: a task name and its options. Out: the entries that ``reasoning_gym.create_dataset`` makes, unchanged, so that the
task's own ``score_answer`` can judge a response. Knows nothing of prompts or tokens.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from verl.common.errors import ConfigError, MissingExtra, did_you_mean

DEFAULT_SEED = 0


def entries(task: str, options: dict[str, str], key: str) -> Iterator[dict[str, Any]]:
    """The entries (question, answer, metadata) of ``task``.

    options  the task's own settings as text, read as JSON where that parses ("3", "true", "[1, 2]"); ``seed`` is 0
             when left out. ``num_terms=2`` sets both ``min_terms`` and ``max_terms`` where a task has only these.
    Raises MissingExtra without the package; ConfigError for an unknown task or option or a value the task refuses.
    reasoning-gym makes entry i from seed + i: two seeds closer than ``size`` share entries.
    """
    try:
        from reasoning_gym import create_dataset
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise MissingExtra("reasoning-gym", "gym", f"the data source 'gym:{task}'") from error
    if task not in DATASETS:
        raise ConfigError(f"{key}: reasoning-gym has no task {task!r}{did_you_mean(task, DATASETS)}")
    known = {field.name for field in dataclasses.fields(DATASETS[task][1])}
    settings: dict[str, Any] = {"seed": DEFAULT_SEED}
    for name, text in options.items():
        settings.update(dict.fromkeys(_fields_of(name, known, task, key), _parse(text)))
    try:
        made = create_dataset(task, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"{key}: the task 'gym:{task}' refuses {settings}: {error}") from error
    return (made[index] for index in range(len(made)))


def ground_truth(entry: dict[str, Any]) -> Any:
    """The entry's answer; empty text for the tasks that have no single one and judge by ``score_answer`` alone."""
    return "" if entry["answer"] is None else entry["answer"]


def _fields_of(name: str, known: set[str], task: str, key: str) -> list[str]:
    if name in known:
        return [name]
    bounds = [f"{bound}_{name.removeprefix('num_')}" for bound in ("min", "max")]
    if known.issuperset(bounds):
        return bounds
    hint = did_you_mean(name, known)
    raise ConfigError(f"{key}: the task 'gym:{task}' has no option {name!r}{hint}. Known: {', '.join(sorted(known))}")


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
