"""A recipe as a run makes it, and batches that its roles take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.batches import sampled_batch
from tests.trainer.runs import sections
from verl.batch import Batch
from verl.models.loading import load_tokenizer
from verl.trainer.sections import OnPolicyRun
from verl.workers.recipe import Recipe


def recipe_of(folder: Path, **changes: Any) -> Recipe:
    """Of the run that ``sections`` describes."""
    run = OnPolicyRun.parse(sections(folder, **changes))
    return Recipe(
        model=run.model,
        tokenizer=load_tokenizer(run.model),
        algorithm=run.algorithm,
        rollout=run.rollout,
        actor=run.actor,
        critic=run.critic,
        reference=run.reference,
        seed=run.trainer.seed,
    )


def batch_of(responses: list[int]) -> Batch:
    """Rows with ids that the tiny run's model of 14 tokens knows."""
    batch = sampled_batch([2] * len(responses), responses)
    for name in ("prompt_ids", "response_ids"):
        batch.put(name, batch[name] % 14, batch.lengths(name).tolist())
    batch.put("old_log_probs", batch["rollout_log_probs"])
    batch.put("ref_log_probs", batch["rollout_log_probs"] - 0.1)
    return batch


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether both hold equal tensors by equal names."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
