"""A role's forward passes and optimizer steps over packed micro-batches.

A batch comes in; one number a response token, or metrics of an update, go out. The micro-batch loop stands here once.
A loss gives a sum and a count; only this file divides, once, by the count over all micro-batches, so cutting
a batch differently changes nothing. It knows nothing of rewards, advantages or generation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from verl.algorithms.base import Loss
from verl.batch import FIELDS, Batch, pad_rows
from verl.common.errors import ConfigError
from verl.engines.config import EngineConfig, TrainedConfig
from verl.engines.masters import Masters
from verl.engines.packing import cut_by_tokens, pack, row_lengths
from verl.models.networks import Network
from verl.observe.metrics import MetricSums

LossFunction = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Loss]
"""(network outputs, batch columns), all padded to [B, R] -> Loss."""


class Engine:
    """Runs ``network`` forward only."""

    def __init__(self, network: Network, config: EngineConfig, device: torch.device) -> None:
        self.network, self.config, self.device = network, config, device

    @torch.no_grad()
    def infer(self, batch: Batch, output: str) -> Tensor:
        """The network's ``output`` for each response token: [N] float32 on the CPU, in the batch's order."""
        self.network.module.eval()
        pieces: list[Tensor] = [torch.empty(0)] * len(batch)
        for index in self._cut(batch):
            part = batch.select(index)
            values = self.network(pack(part, self.device))[output].float().cpu()
            for row, piece in zip(index, values.split(part.lengths("response_ids").tolist()), strict=True):
                pieces[row] = piece
        return torch.cat(pieces) if pieces else torch.empty(0)

    def _cut(self, batch: Batch) -> list[list[int]]:
        return cut_by_tokens(row_lengths(batch).tolist(), self.config.max_tokens_per_micro_batch)


class TrainingEngine(Engine):
    """An engine that also learns: AdamW on float32 masters."""

    def __init__(self, network: Network, config: TrainedConfig, device: torch.device, label: str) -> None:
        super().__init__(network, config, device)
        self.optim_config, self.label = config.optim, label
        self.masters = Masters(network.module)
        self.optimizer = torch.optim.AdamW(
            list(self.masters.masters.items()),
            lr=config.optim.lr,
            betas=(config.optim.beta1, config.optim.beta2),
            weight_decay=config.optim.weight_decay,
            fused=device.type == "cuda",
        )
        self.has_unsynced_update = False
        if config.gradient_checkpointing:
            _enable_gradient_checkpointing(network, label)

    def update(self, batch: Batch, loss_function: LossFunction, *, lr: float, entropy: bool = False) -> MetricSums:
        """One optimizer step over all rows of ``batch``.

        lr       learning rate of this step
        entropy  whether the loss needs the entropy's gradient
        Returns the loss's metrics and `<label>/grad_norm`, `<label>/skipped_updates`, `<label>/lr`. An update whose
        gradient isn't finite is skipped and counted; one without a token to learn from changes nothing.
        """
        self._prepare_module()
        metrics = MetricSums()
        total, tokens = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        for part in self._micro_batches(batch):
            outputs = _padded(self.network(pack(part, self.device), entropy), part)
            columns = _columns(part, self.device)
            loss = loss_function(outputs, columns)
            if loss.sum.requires_grad:
                loss.sum.backward()
            total = total + loss.count
            tokens = tokens + columns["response_mask"].sum()
            metrics.update(loss.metrics)
        has_tokens = bool(tokens)  # a count of 0 is no sign: a plain sum has none
        grad_norm, is_applied = self._step(float(Loss.divisor(total)), lr) if has_tokens else (0.0, True)
        self.optimizer.zero_grad()
        metrics.add_mean(f"{self.label}/grad_norm", grad_norm, 1)
        metrics.add_mean(f"{self.label}/lr", lr, 1)
        metrics.add_sum(f"{self.label}/skipped_updates/sum", float(not is_applied))
        return metrics

    def _prepare_module(self) -> None:
        """Evaluation mode, as the sampler's: what a model does in training mode only makes it another policy.

        Where layers are checkpointed they alone, not their parts, must be in training mode for it to happen.
        """
        self.network.module.eval()
        if self.config.gradient_checkpointing:
            for part in self.network.module.modules():
                part.training = bool(getattr(part, "gradient_checkpointing", False))

    def _micro_batches(self, batch: Batch) -> Iterator[Batch]:
        for index in self._cut(batch):
            yield batch.select(index)

    def _step(self, divisor: float, lr: float) -> tuple[float, bool]:
        """Divide the gradient, clip, apply. Returns the norm before clipping and whether the update was applied."""
        gradients = self.masters.gradients()
        torch._foreach_div_(gradients, divisor)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        grad_norm = float(norm)
        is_finite = math.isfinite(grad_norm)
        if is_finite:
            limit = self.optim_config.max_grad_norm
            if limit is not None and grad_norm > limit:
                torch._foreach_mul_(gradients, limit / grad_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.masters.publish()
            self.has_unsynced_update = True
        return grad_norm, is_finite


def _columns(part: Batch, device: torch.device) -> dict[str, Tensor]:
    """Every response-shaped number of the batch as [B, R], and every [B] one, on ``device``."""
    columns = {}
    for name in part.names:
        shape = FIELDS[name].shape
        if shape == "response" and name != "response_ids":
            columns[name] = part.padded(name).to(device, non_blocking=True)
        elif shape == "row":
            columns[name] = part[name].to(device, non_blocking=True)
    return columns


def _padded(outputs: Mapping[str, Tensor], part: Batch) -> dict[str, Tensor]:
    lengths = part.lengths("response_ids")
    return {name: pad_rows(values, lengths) for name, values in outputs.items()}


def _enable_gradient_checkpointing(network: Network, label: str) -> None:
    """Raises ConfigError naming the role's key for a model that can't."""
    for module in network.module.modules():
        if isinstance(module, PreTrainedModel):
            # transformers 5.24 renamed the method and its argument
            kind = "activation" if hasattr(module, "activation_checkpointing_enable") else "gradient"
            enable = getattr(module, f"{kind}_checkpointing_enable")
            try:
                enable(**{f"{kind}_checkpointing_kwargs": {"use_reentrant": False}})
            except ValueError as error:
                raise ConfigError(f"{label}.gradient_checkpointing can't be true: {error}") from error
            return
