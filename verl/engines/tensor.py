"""Tensor parallelism: each rank of the tp axis holds a slice of every projection and computes its share of the heads.

In comes a module with all its weights, out goes the same module with DTensor weights whose forward gives the same
activations on every rank of the axis. Which projection is cut how is the model's own plan, as transformers declares it;
the cuts are torch's. Embeddings, norms and the output head stay whole: every rank computes them from the same
activations, so their gradients are whole and equal too. It knows nothing of losses, batches or other axes.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PretrainedConfig

from verl.common.errors import ConfigError, UnsupportedModel
from verl.engines.mesh import Mesh
from verl.models.causal_lm import CausalLM

KEY = "tensor_parallel_size"


class HeadNorm(ParallelStyle):
    """A norm over each head's own features: one weight for all heads, of which a rank sees its share.

    The weight is a replicated DTensor and the heads are a sharded one, [1, N, H, D] cut along H, so that its gradient
    is known to be a part of a sum.
    """

    HEADS = 2

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for key, parameter in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter.detach(), device_mesh, [Replicate()])
            module.register_parameter(key, nn.Parameter(whole, requires_grad=parameter.requires_grad))

        def enter(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (DTensor.from_local(inputs[0], device_mesh, [Shard(self.HEADS)], run_check=False), *inputs[1:])

        def leave(_: nn.Module, inputs: tuple[Tensor, ...], output: DTensor) -> Tensor:
            return output.to_local()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module


STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
    "replicated_with_grad_allreduce": HeadNorm,
}
"""transformers' name of a cut -> torch's."""


def apply_tensor_parallel(lm: CausalLM, mesh: Mesh) -> None:
    """Cut ``lm``'s backbone over the tp axis of ``mesh``, in place. Every rank holds the same weights beforehand.

    Raises UnsupportedModel, by name, for a model without a plan or with a cut that isn't known, ConfigError naming
    ``tensor_parallel_size`` where a width isn't a multiple of it.
    """
    if mesh.tp_size == 1:
        return
    cuts = tensor_cuts(lm, mesh.tp_size)
    parallelize_module(lm.backbone, mesh.axis("tp"), {name: STYLES[cut]() for name, cut in cuts.items()})


def tensor_cuts(lm: CausalLM, size: int) -> dict[str, str]:
    """Name in the backbone of each module that ``size`` ranks split -> its style. The module may be an outline.

    Raises as ``apply_tensor_parallel``.
    """
    config = lm.module.config.get_text_config()
    cuts = _cuts(lm, _plan(lm, config))
    _check_widths(lm, config, cuts, size)
    return cuts


def heads_of_a_rank(lm: CausalLM, size: int) -> int:
    """Query heads that each of ``size`` ranks computes. Raises as ``apply_tensor_parallel``."""
    heads: int = lm.module.config.get_text_config().num_attention_heads
    return heads // size if size > 1 and _has_local_heads(tensor_cuts(lm, size)) else heads


def _plan(lm: CausalLM, config: PretrainedConfig) -> dict[str, str]:
    """The model's plan: pattern of a module's name in the backbone -> name of the cut."""
    plan: dict[str, str] | None = config.base_model_tp_plan
    if not plan:
        raise UnsupportedModel(
            f"{lm.name!r} ({type(lm.module).__name__}) has no plan of tensor parallelism in transformers: set {KEY}=1"
        )
    return plan


def _cuts(lm: CausalLM, plan: dict[str, str]) -> dict[str, str]:
    """Name of each module that is cut -> its style; patterns that nothing matches belong to other variants.

    Some versions of transformers plan a cut of an embedding that is the head too: it stays whole, as every embedding.
    """
    names = [name for name, module in lm.backbone.named_modules() if not isinstance(module, nn.Embedding)]
    names += [name for name, _ in lm.backbone.named_parameters()]
    cuts: dict[str, str] = {}
    for pattern, style in plan.items():
        matches = re.compile(fnmatch.translate(pattern)).match
        found = [name for name in names if matches(name)]
        if found and style not in STYLES:
            raise UnsupportedModel(
                f"{lm.name!r} ({type(lm.module).__name__}) cuts {pattern!r} by {style!r}, which this library doesn't "
                f"know; it knows {', '.join(STYLES)}: set {KEY}=1"
            )
        cuts |= dict.fromkeys(found, style)
    return cuts


def _check_widths(lm: CausalLM, config: PretrainedConfig, cuts: dict[str, str], size: int) -> None:
    """Raises ConfigError where a slice would cut through a head or leave ranks with unequal widths."""
    if _has_local_heads(cuts):
        for key in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, key)
            if heads % size:
                raise ConfigError(
                    f"{KEY}={size} doesn't divide the model's {key}={heads}: set {KEY} to a divisor of it"
                )
    for name, style in cuts.items():
        module: Any = lm.backbone.get_submodule(name)
        if not isinstance(module, nn.Linear):
            continue
        width = module.in_features if style.startswith("rowwise") else module.out_features
        if width % size:
            raise ConfigError(
                f"{KEY}={size} doesn't divide the width {width} of {name!r}: set {KEY} to a divisor of it"
            )


def _has_local_heads(cuts: dict[str, str]) -> bool:
    """Whether attention runs on a share of the heads: its queries aren't gathered."""
    return any(name.endswith("q_proj") and style == "colwise" for name, style in cuts.items())
