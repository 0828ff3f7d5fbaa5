"""An engine's part of a checkpoint at one moment, to be written while the engine goes on.

Weights, optimizer state and masters come in; files go out, from any thread. When and where is the store's business.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.common.ranks import is_distributed, is_first_rank
from verl.engines.saved_model import save_weights
from verl.engines.saved_optimizer import OptimizerState, write_optimizer
from verl.models.networks import Network

MODEL, OPTIMIZER = "model", "optimizer"
"""Folders of an engine's part of a checkpoint."""
_LONGEST_WRITE = timedelta(days=1)


@dataclass(frozen=True)
class Snapshot:
    """What is written. Every rank has one of the same moment.

    weights  whole, by name, buffers too, of an adapter its own alone; on the first rank only
    group    of all ranks, for the writers; None where there is one
    """

    network: Network
    weights: Mapping[str, Tensor]
    optimizer: OptimizerState
    tokenizer: PreTrainedTokenizerBase | None
    group: dist.ProcessGroup | None

    @staticmethod
    def take(
        network: Network,
        weights: Iterator[tuple[str, Tensor]],
        optimizer: OptimizerState,
        tokenizer: PreTrainedTokenizerBase | None,
        group: dist.ProcessGroup | None,
        *,
        copied: bool,
    ) -> Snapshot:
        """From an engine's whole ``weights`` and its own ``optimizer`` state; every rank must call this.

        copied  whether tensors are copied to CPU memory, so that training may go on before they are written
        """
        kept = kept_on_first_rank(weights, copied=copied)
        if copied:
            state = {name: tensor.to("cpu", copy=True) for name, tensor in optimizer.tensors.items()}
            optimizer = OptimizerState(copy.deepcopy(optimizer.described), state)
            tokenizer = copy.deepcopy(tokenizer)  # one that encodes and saves at once raises
        return Snapshot(network, kept, optimizer, tokenizer, group)

    def write(self, folder: Path) -> None:
        """Write ``folder/model``, which the first rank does, and ``folder/optimizer``, each rank its own.

        Every rank must call this. The one who fails alone does so last: nobody waits for it.
        """
        write_optimizer(folder / OPTIMIZER, self.optimizer, self.group)
        save_weights(folder / MODEL, self.network, self.weights, self.tokenizer)


def writers_group() -> dist.ProcessGroup | None:
    """A process group of all ranks that carries nothing but what writers tell each other; None with one rank.

    Every rank must call this. Its ranks begin to write when their own calls let them, so it waits long.
    """
    if not is_distributed():
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_LONGEST_WRITE)
    return group


@torch.no_grad()
def kept_on_first_rank(weights: Iterator[tuple[str, Tensor]], *, copied: bool) -> dict[str, Tensor]:
    """Whole ``weights`` on the first rank, nothing on the others; every rank must call this.

    One at a time to the CPU where ranks put them together: a second whole model has no room on a device.
    """
    to_cpu = copied or is_distributed()
    kept = {}
    for name, tensor in weights:  # every rank goes through all: together they make each
        if is_first_rank():
            kept[name] = tensor.detach().to("cpu", copy=copied) if to_cpu else tensor.detach()
    return kept
