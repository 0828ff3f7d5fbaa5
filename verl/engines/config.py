"""Keys of a trained role: optimizer, micro-batches, memory."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from verl.common.section import Section
from verl.engines.mesh import ParallelConfig

Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """AdamW with warm-up and a schedule over trainer steps."""

    formerly: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("beta1", "beta2"), "write betas: [beta1, beta2]"),
        "min_lr_frac": "a schedule ends at 0; set trainer.total_steps higher to stop before",
    }

    lr: float = Field(1e-6, ge=0)
    """Peak learning rate."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay (Loshchilov & Hutter 2019)."""
    betas: list[Decay] = Field([0.9, 0.999], min_length=2, max_length=2)
    """Decay of the running means of the gradient and of its square; each at least 0 and below 1."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Gradients are scaled down to this global 2-norm; null: never."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the rate rises linearly from lr / warmup_steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls from its peak, right after the warm-up, to 0 past the last step; no step is wasted on 0."""

    def lr_at(self, step: int, total_steps: int) -> float:
        """Learning rate of ``step`` (1-based) in a run of ``total_steps``."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        progress = min(1.0, (step - 1 - self.warmup_steps) / max(1, total_steps - self.warmup_steps))
        fall = progress if self.schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
        return self.lr * (1 - fall)


class EngineConfig(Section):
    """How a role's passes over its model run."""

    formerly: ClassVar[dict[str, str]] = {
        "gradient_checkpointing": "the role makes no backward pass",
        "reshard_after_forward": "without a backward pass a layer's gathered weights are always freed after use",
    }

    parallel: ParallelConfig = ParallelConfig()
    """How many ranks hold one copy of the model; the rest of the role's devices hold other copies."""
    max_tokens_per_micro_batch: int = Field(16384, ge=1)
    """Packed tokens (prompt and response) of one forward pass. Changes memory and speed, never results."""
    offload_parameters: bool = False
    """Over several ranks: weights, and gradients and moments of a role that learns, lie in CPU memory; a layer's
    weights visit the GPU when it runs, and the optimizer runs on the CPU."""


class TrainedConfig(EngineConfig):
    """A role that learns."""

    gradient_checkpointing: bool = False
    """Keep only layer inputs for the backward pass and compute the rest again: less memory, a third more compute."""
    compile: bool = False
    """Run decoder layers through torch.compile, which fuses norms, rotary and activations: faster steps, after a first
    one that takes some tens of seconds longer. Needs a C++ compiler."""
    reshard_after_forward: bool = True
    """Over several ranks: free a layer's gathered weights after each use. False keeps them for a whole update, and
    reduces gradients once at its end: less communication, more memory."""
    optim: OptimConfig = OptimConfig()
    """The optimizer."""
    offload_optimizer: bool = False
    """AdamW's moments lie in CPU memory between updates: 8 bytes a parameter freed for the rollout."""
    epochs_per_step: int = Field(1, ge=1)
    """Passes over each step's responses."""
    mini_batches_per_epoch: int = Field(1, ge=1)
    """Optimizer updates in a pass; the responses are split evenly."""
