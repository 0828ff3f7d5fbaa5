"""The types that a model's weights have. Knows nothing of which type a run computes in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


def cast_parameters(module: nn.Module, dtypes: torch.dtype | Mapping[str, torch.dtype]) -> None:
    """Bring all parameters of ``module``, in place, to one type or each to the one that ``dtypes`` has for its name.

    Buffers keep theirs, as where transformers loads a model: rotary frequencies are float32 beside weights of any type.
    ``module.to(dtype)`` would round them, and a token far from the start would be turned by another angle.
    """
    for name, parameter in module.named_parameters():
        parameter.data = parameter.data.to(dtypes if isinstance(dtypes, torch.dtype) else dtypes[name])
