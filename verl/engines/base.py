"""A role's forward passes and optimizer steps over packed micro-batches.

A batch comes in; one number a response token, or metrics of an update, go out. A loss gives a sum and a count; only
this file divides, once, by the count over all micro-batches and ranks, so cutting a batch differently changes nothing.
It knows nothing of rewards, advantages or generation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.algorithms.base import Loss
from verl.batch import FIELDS, Batch, pad_rows
from verl.common.errors import CheckpointError, ConfigError
from verl.common.transfer import to_device
from verl.engines.config import EngineConfig, TrainedConfig
from verl.engines.fsdp import holders, local_part, sliced_like
from verl.engines.mesh import Mesh
from verl.engines.offload import MomentsOnCPU
from verl.engines.packing import cut_by_tokens, cut_into, in_batch_order, kept_together, pack, rows_of, unit_lengths
from verl.engines.parallel import parallelize
from verl.engines.saved_model import buffers_of, load_weights, save_base
from verl.engines.saved_optimizer import load_optimizer, optimizer_state
from verl.engines.snapshot import MODEL, OPTIMIZER, Snapshot, kept_on_first_rank, writers_group
from verl.models.compiled import CompiledLayers
from verl.models.lora import has_adapter
from verl.models.networks import Network, PackedRows
from verl.observe.metrics import MetricSums, merged_over_ranks

LossFunction = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Loss]
"""(network outputs, batch columns), all padded to [B, R] -> Loss."""


class Engine:
    """Runs ``network`` forward only, over the ranks of ``mesh``.

    Every rank is given a network with the same weights, and in each call the rows of its data-parallel rank: any
    number of them, none too. Every rank must make the same calls in the same order.
    """

    is_trained = False

    def __init__(
        self,
        network: Network,
        config: EngineConfig,
        device: torch.device,
        label: str = "reference",
        mesh: Mesh | None = None,
    ) -> None:
        self.config, self.device, self.label = config, device, label
        self.mesh = mesh or Mesh.single()
        self.dtype = next(network.module.parameters()).dtype
        self._offset = network.offset
        made = parallelize(network, config, self.mesh, device, label, is_trained=self.is_trained)
        self.network, self.passes, self._full_tensors = made.network, made.passes, made.full_tensors
        if made.weights is not None:
            self.masters = made.weights
        self._layers: Callable[[], AbstractContextManager[None]] = nullcontext

    def infer(self, batch: Batch, output: str) -> Tensor:
        """The network's ``output`` for each response token: [N] float32 on the CPU, in the batch's order."""
        self.network.module.eval()
        cut = self._cut(batch)
        with self._layers():
            found = list(self.passes.infer((self._pack(batch.select(index)) for index in cut), output))
        if not len(batch):
            return torch.empty(0)
        values = torch.cat(found).cpu()  # of all at once: the device waits once, not often
        return in_batch_order(values, [row for index in cut for row in index], batch)

    def named_full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by the module's own name, whole, in the compute type, one at a time, on every rank.

        Every rank must go through all of them. They may be the parameters themselves: copy what is to be kept.
        """
        yield from self._full([name for name, _ in self.network.module.named_parameters()])

    def _full(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        yield from self.passes.full_tensors(self._full_tensors(names))

    def _saved(self) -> dict[str, Tensor]:
        """The parameters that a checkpoint holds: with an adapter those that learn, else all."""
        is_part = has_adapter(self.network.module)
        return {name: p for name, p in self.network.module.named_parameters() if p.requires_grad or not is_part}

    @torch.no_grad()
    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy whole ``weights`` by the module's own names into what this rank holds of them, in place; of a module
        with an adapter those that learn.

        Raises CheckpointError for one that is missing or has another shape.
        """
        for name, parameter in self._saved().items():
            if name not in weights or weights[name].shape != parameter.shape:
                raise CheckpointError(f"there is no tensor of shape {list(parameter.shape)} for {name!r}")
            local_part(parameter).copy_(sliced_like(weights[name], parameter))

    def _pack(self, part: Batch) -> PackedRows:
        return pack(part, self.device, self._offset)

    def _cut(self, batch: Batch) -> list[list[int]]:
        """Rows of each micro-batch: as many of them on every data-parallel rank as the one with the most needs."""
        units = kept_together(batch)
        lengths = unit_lengths(batch, units)
        bins = cut_by_tokens(lengths, self.config.max_tokens_per_micro_batch * self.mesh.sp_size)
        count = torch.tensor(len(bins), device=self.device)
        if self.mesh.dp_size > 1:
            dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self.mesh.dp_group)
        return rows_of(units, cut_into(bins, lengths, int(count)))


class TrainingEngine(Engine):
    """An engine that also learns: AdamW on float32 masters."""

    is_trained = True
    config: TrainedConfig

    def __init__(
        self, network: Network, config: TrainedConfig, device: torch.device, label: str, mesh: Mesh | None = None
    ) -> None:
        super().__init__(network, config, device, label, mesh)
        self.optim_config = config.optim
        parameters = list(self.masters.stepped.items())
        self.optimizer = torch.optim.AdamW(
            parameters,
            lr=config.optim.lr,
            betas=(config.optim.betas[0], config.optim.betas[1]),
            weight_decay=config.optim.weight_decay,
            fused=all(p.is_cuda for _, p in parameters),
        )
        self._moments = MomentsOnCPU(self.optimizer) if config.offload_optimizer else nullcontext()
        self._writers: dist.ProcessGroup | None = None  # of checkpoints, made when the first is
        self.has_unsynced_update = False
        self.skipped_in_a_row = 0
        if config.gradient_checkpointing:
            _enable_gradient_checkpointing(network, label)
        if config.compile:
            self._layers = CompiledLayers(network.lm.backbone, f"{label}.compile").active

    def update(self, batch: Batch, loss_function: LossFunction, *, lr: float, entropy: bool = False) -> MetricSums:
        """One optimizer step over all rows of ``batch``, those of the other data-parallel ranks included.

        lr       learning rate of this step
        entropy  whether the loss needs the entropy's gradient
        Returns the loss's metrics and `<label>/grad_norm`, `<label>/lr`, `<label>/skipped_updates/sum`,
        `<label>/skipped_in_a_row/max`, on every rank those of all ranks. An update whose loss or gradient isn't finite
        is skipped and counted; one without a token to learn from changes nothing.
        """
        self._prepare_module()
        tally = _Tally(self.device)
        parts = [batch.select(index) for index in self._cut(batch)]

        def loss_of(index: int, outputs: Mapping[str, Tensor]) -> Tensor:
            if not len(parts[index]):
                return _anchor(outputs)
            columns = columns_on(parts[index], self.device)
            loss = loss_function(_padded(outputs, parts[index]), columns)
            tally.add(loss, columns["response_mask"])
            # without a gradient of its own it takes a zero one: other ranks wait for this one's backward pass
            return loss.sum if loss.sum.requires_grad else _anchor(outputs)

        with self._layers():
            self.passes.learn(
                (self._pack(part) for part in parts),
                entropy,
                loss_of,
                lambda index: self.masters.expect_backward(is_last=index == len(parts) - 1),
            )
        metrics, total, count, tokens = self._of_all_ranks(tally)
        # a count of 0 is no sign of no tokens: a plain sum has none
        grad_norm, is_applied = self._step(total, float(Loss.divisor(count)), lr) if tokens else (0.0, True)
        self.masters.clear_gradients()
        self.skipped_in_a_row = 0 if is_applied else self.skipped_in_a_row + 1
        metrics.add_mean(f"{self.label}/grad_norm", grad_norm, 1)
        metrics.add_mean(f"{self.label}/lr", lr, 1)
        metrics.add_sum(f"{self.label}/skipped_updates/sum", float(not is_applied))
        metrics.add_max(f"{self.label}/skipped_in_a_row/max", float(self.skipped_in_a_row))
        return metrics

    def snapshot(self, tokenizer: PreTrainedTokenizerBase | None = None, *, copied: bool = True) -> Snapshot:
        """Weights, moments and masters as they are now, for a checkpoint; every rank must call this.

        copied  to CPU memory, so that training may go on before they are written; else they must be written first
        A network with a head of its own gives one file of weights, one with an adapter a folder that peft loads, any
        other one that plain transformers loads.
        """
        if self._writers is None:
            self._writers = writers_group()
        weights = chain(buffers_of(self.network).items(), self._full(self._saved()))
        optimizer = optimizer_state(self.optimizer, self.masters.separate, parameters=self.masters.masters)
        return Snapshot.take(self.network, weights, optimizer, tokenizer, self._writers, copied=copied)

    def restore(self, folder: Path) -> None:
        """Take up what ``Snapshot.write`` wrote, on however many ranks it was."""
        self.set_weights(load_weights(folder / MODEL, self.network))
        self.masters.adopt()
        masters = self.masters
        load_optimizer(folder / OPTIMIZER, self.optimizer, masters.separate, parameters=masters.masters)

    def save_base(self, folder: Path) -> None:
        """Write the frozen model below the adapter, whole, as a folder that plain transformers loads; every rank must
        call it."""
        save_base(folder, self.network, kept_on_first_rank(self.named_full_tensors(), copied=False))

    def checkpoint_bytes(self) -> int:
        """What this rank's share of a checkpoint's tensors takes: weights, two moments of each, separate masters.

        Where ranks hold the same slice, each has a part of its share: those of all ranks add up to the whole.
        """
        weights = self._shared_bytes(self._saved().values(), self.dtype)
        separate = self._shared_bytes(self.masters.separate.values(), torch.float32)
        return weights + separate + 2 * self._shared_bytes(self.masters.masters.values(), torch.float32)

    def _shared_bytes(self, tensors: Iterable[Tensor], dtype: torch.dtype) -> int:
        return sum(local_part(t).numel() * dtype.itemsize // holders(t, self.mesh) for t in tensors)

    def _of_all_ranks(self, tally: _Tally) -> tuple[MetricSums, float, Tensor, float]:
        """Metrics, loss, count and number of tokens over all data-parallel ranks."""
        if self.mesh.dp_size > 1:
            dist.all_reduce(tally.sums, group=self.mesh.dp_group)
            tally.metrics = merged_over_ranks(tally.metrics, self.mesh.dp_group)
        metrics, (total, count, tokens) = self.passes.from_last((tally.metrics, tally.sums))
        return metrics, float(total), count, float(tokens)

    def _prepare_module(self) -> None:
        """Evaluation mode, as the sampler's: what a model does in training mode only makes it another policy.

        Where layers are checkpointed they alone, not their parts, must be in training mode for it to happen.
        """
        self.network.module.eval()
        if self.config.gradient_checkpointing:
            for part in self.network.module.modules():
                part.training = bool(getattr(part, "gradient_checkpointing", False))

    def _step(self, loss: float, divisor: float, lr: float) -> tuple[float, bool]:
        """Divide the gradient, clip, apply. Returns the norm before clipping and whether the update was applied."""
        gradients = self.masters.gradients()
        torch._foreach_div_(gradients, divisor)
        grad_norm = float(self.masters.grad_norm())
        is_finite = math.isfinite(grad_norm) and math.isfinite(loss)
        if is_finite:
            limit = self.optim_config.max_grad_norm
            if limit is not None and grad_norm > limit:
                torch._foreach_mul_(gradients, limit / grad_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            with self._moments:
                self.optimizer.step()
            self.masters.publish()
            self.has_unsynced_update = True
        return grad_norm, is_finite


class _Tally:
    """What the losses of an update's micro-batches add up to: metrics, and [3] loss, count and response tokens."""

    def __init__(self, device: torch.device) -> None:
        self.metrics = MetricSums()
        self.sums = torch.zeros(3, device=device)

    def add(self, loss: Loss, response_mask: Tensor) -> None:
        pieces = (loss.sum.detach(), loss.count, response_mask.sum())
        self.sums = self.sums + torch.stack([piece.to(self.sums) for piece in pieces])
        self.metrics.update(loss.metrics)


def _anchor(outputs: Mapping[str, Tensor]) -> Tensor:
    """Zero, with a zero gradient to whatever gave the outputs."""
    return torch.stack([values.sum() for values in outputs.values() if values.requires_grad]).sum() * 0.0


def columns_on(part: Batch, device: torch.device) -> dict[str, Tensor]:
    """Every response-shaped number of the batch as [B, R], and every [B] one, on ``device``."""
    columns = {}
    for name in part.names:
        shape = FIELDS[name].shape
        if shape == "response" and name != "response_ids":
            columns[name] = to_device(part.padded(name), device)
        elif shape == "row":
            columns[name] = to_device(part[name], device)
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
