"""Tasks of the package ``reasoning-gym``: its own verifier scores the answer against the row's entry."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from verl.common.errors import MissingExtra


def reasoning_gym(response: str, entry: Mapping[str, Any], task: str | None = None, tag: str = "answer") -> float:
    """The task's score, 0 to 1, of the text in the last ``<answer>...</answer>``, or of the whole response without it.

    entry  what the gym made: question, answer, metadata
    task   the gym's name of the task; left out, the entry's ``metadata["source_dataset"]``
    tag    the tag around the answer; "" takes the whole response
    Raises ValueError when neither names a task, MissingExtra without the package.
    """
    task = task or (entry.get("metadata") or {}).get("source_dataset")
    if not task:
        raise ValueError("the entry's metadata has no 'source_dataset': give the task in reward.kwargs")
    return float(_task(task).score_answer(answer=_tagged(response, tag), entry=dict(entry)))


@cache
def _task(name: str) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError:
        raise MissingExtra("reasoning-gym", "gym", "the reward 'reasoning_gym'") from None
    if name not in DATASETS:
        raise ValueError(f"reasoning-gym has no task {name!r}")
    return create_dataset(name)


def _tagged(response: str, tag: str) -> str:
    end = response.rfind(f"</{tag}>") if tag else -1
    start = response.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return response[start + len(tag) + 2 : end].strip() if start >= 0 else response.strip()
