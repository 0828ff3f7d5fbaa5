"""Decoder layers through ``torch.compile``, for as long as a role makes its passes.

What stands between a layer's matrix products (norms, rotary, activations, residual sums) becomes a few fused kernels,
forward and backward. Attention stays outside of what is compiled. The rollout, which shares the module, has fused
forwards of its own and doesn't see these.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from verl.common.errors import ConfigError
from verl.models.forwards import forward_of, put
from verl.models.networks import decoder_layers

BACKEND = "inductor"
_RECOMPILE_LIMIT = 64
"""Layers share one piece of code, which is compiled anew with and without gradients, adapters, windows."""


class CompiledLayers:
    """The decoder layers of ``backbone``, compiled when they first run; hooks around them stay as they are.

    key  that asks for it, for messages
    Raises ConfigError where there is no compiler.
    """

    def __init__(self, backbone: nn.Module, key: str) -> None:
        _check_compiler(key)
        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, _RECOMPILE_LIMIT)
        self._places = [
            forward_of(layer, torch.compile(layer.forward, backend=BACKEND)) for layer in decoder_layers(backbone)
        ]

    @contextmanager
    def active(self) -> Iterator[None]:
        """The layers run compiled within the block, which holds the backward pass too; what can't be compiled runs as
        it is, and torch warns of it."""
        with put(self._places), torch._dynamo.config.patch(suppress_errors=True):
            yield


def _check_compiler(key: str) -> None:
    names = [name for name in (os.environ.get("CXX"), "g++", "clang++") if name]
    if not any(shutil.which(name) for name in names):
        raise ConfigError(
            f"{key}=true needs a C++ compiler, and there is none of {', '.join(names)}: install one or set it to false"
        )
