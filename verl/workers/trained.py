"""Roles that learn: the actor, the critic, a reward model. Each infers one column and updates on a batch.

Thin glue: an engine does the passes, the algorithm gives the loss, this file splits a step's batch into mini-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.base import Algorithm, Loss
from verl.batch import Batch, pad_rows
from verl.common.seeding import derive_seed
from verl.engines.base import TrainingEngine, columns_on
from verl.engines.config import TrainedConfig
from verl.engines.packing import kept_together, rows_of
from verl.observe.metrics import MetricSums


class TrainedRole:
    """Mini-batches, epochs and learning rate of a role that learns."""

    name: str
    writes: str
    output: str
    """Of the network: what the loss is of, and what ``writes`` gets."""

    def __init__(self, engine: TrainingEngine, config: TrainedConfig, algorithm: Algorithm[Any], seed: int) -> None:
        self.engine, self.config, self.algorithm, self.seed = engine, config, algorithm, seed

    def infer(self, batch: Batch) -> None:
        """Write this role's column: one number a response token, under the weights before the update."""
        batch.put(self.writes, self.engine.infer(batch, self.output))

    @torch.no_grad()
    def measure(self, batch: Batch) -> MetricSums:
        """Metrics of the loss of ``batch`` as the weights are now, which stay as they are."""
        values = pad_rows(self.engine.infer(batch, self.output), batch.lengths("response_ids"))
        metrics = MetricSums()
        metrics.update(self.loss({self.output: values}, columns_on(batch, values.device)).metrics)
        return metrics

    def loss(self, outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
        """The role's loss on padded network outputs and batch columns."""
        raise NotImplementedError

    def update(self, batch: Batch, *, step: int, total_steps: int) -> MetricSums:
        """Learn from ``batch``: every epoch visits every row once; a batch without rows changes and measures nothing.

        ``step`` is 1-based.
        """
        lr = self.config.optim.lr_at(step, total_steps)
        metrics = MetricSums()
        for part in self._mini_batches(batch, step):
            metrics.merge(self.engine.update(part, self.loss, lr=lr, entropy=self.needs_entropy_gradient))
        return metrics

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the role's loss differentiates the entropy."""
        return False

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates in a step."""
        return self.config.epochs_per_step * self.config.mini_batches_per_epoch

    def _mini_batches(self, batch: Batch, step: int) -> Iterator[Batch]:
        if not len(batch):
            return
        units = kept_together(batch)
        parts = min(self.config.mini_batches_per_epoch, len(units))
        for epoch in range(self.config.epochs_per_step):
            if parts == 1:
                yield batch
                continue
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "mini_batches", step, epoch))
            drawn = torch.randperm(len(units), generator=generator).tensor_split(parts)
            for rows in rows_of(units, [part.tolist() for part in drawn]):
                yield batch.select(rows)


class Actor(TrainedRole):
    """The policy in training."""

    name = "actor"
    writes = "old_log_probs"
    output = "log_probs"

    def loss(self, outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
        return self.algorithm.actor_loss(outputs["log_probs"], outputs.get("entropy"), columns)

    @property
    def needs_entropy_gradient(self) -> bool:
        return self.algorithm.needs_entropy_gradient


class Critic(TrainedRole):
    """The value function."""

    name = "critic"
    writes = "values"
    output = "values"

    def loss(self, outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
        return self.algorithm.critic_loss(outputs["values"], columns)


class RewardModelRole(TrainedRole):
    """A reward model in training; it sees pairs, and never a rollout."""

    name = "reward_model"
    writes = "values"
    output = "scores"

    def loss(self, outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
        return self.algorithm.score_loss(outputs["scores"], columns)
