"""A forward without gradients of an unmodified Hugging Face module, with fewer and wider kernels while it is asked for.

Norms, gated MLPs, rotary embeddings, linear layers that read one input and layers that add to their input are found by
their structure. Each kind is tried against its own forward before it is used; what doesn't agree stays as it is. No
weight is copied, no model is known by name, and outside of ``Fusion.active`` the module is as it was.

Shape letters: N packed tokens, C channels, H query heads, K key heads, D head dim, R rotated dims.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from verl.models.attention import PackedAttention
from verl.models.causal_lm import CausalLM
from verl.models.forwards import OTHER_KIND, Forward, forward_of, put
from verl.models.linear_groups import shared_inputs
from verl.models.residual import residual_layers

log = logging.getLogger(__name__)

Rotate: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""query [N, H, D], key [N, K, D], cos [N, R], sin [N, R] -> query and key, turned."""

_ROTARY = "apply_rotary_pos_emb"
"""The function by which the attention layers of transformers turn queries and keys: a global of their file."""


class Fusion:
    """Finds what can be fused in ``model``, tries it, and lays the weights that are read together side by side.

    counts  how many norms, MLPs, groups of linear layers, rotary functions and layers with a residual stream are fused

    Weights move once, here: graphs and addresses taken before are void. A weight that moves later (another device,
    another type) is still read right; its group runs as separate products until a new Fusion is built.
    """

    def __init__(self, model: CausalLM) -> None:
        module = model.module
        assert self.supported(next(module.parameters()).device)
        with torch.inference_mode(False), torch.no_grad(), _evaluating(module):
            self._groups = shared_inputs(module, lambda: _probe(model))
            norms, mlps = _norms(module), _gated_mlps(module)
            self._forwards = [*norms, *mlps]
            self._rotaries = _rotaries(module)
            self._residuals = residual_layers(module, lambda: _probe(model))
            holds = self._holds(model)
            if not holds and self._residuals:  # a module that reads a layer's input again
                self._residuals = []
                holds = self._holds(model)
            self.counts = dict(
                norms=len(norms),
                mlps=len(mlps),
                groups=len(self._groups),
                rotaries=len(self._rotaries),
                residuals=len(self._residuals),
            )
            if not holds:
                log.warning("%s: its layers differ when they are fused; it runs as it is", model.name)
                self._groups, self._forwards, self._rotaries = [], [], []
                self.counts = dict.fromkeys(self.counts, 0)
        log.info("%s: fused %s", model.name, ", ".join(f"{n} {kind}" for kind, n in self.counts.items()))

    @staticmethod
    def supported(device: torch.device) -> bool:
        """Whether the kernels run on ``device``: CUDA with Triton, or Triton's interpreter anywhere."""
        can_run = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
        return can_run and importlib.util.find_spec("triton") is not None

    @contextmanager
    def active(self, rotate: Rotate) -> Iterator[None]:
        """The module's forwards are fused in this block, and keep no gradients; afterwards it is as it was.

        rotate  turns query [N, H, D] and key [N, K, D] by cos and sin [N, R], which may be float32 beside half
                precision; called once a layer, from the thread that entered. ``fused_kernels.rotate`` is one

        One thread at a time: the rotary function belongs to all models of the family. Layers overwrite their input:
        embeddings that are handed in, and hidden states that a hook keeps, don't stay what they are.
        """
        places = [forward_of(part, forward) for part, forward in self._forwards]
        places += [forward_of(layer, forward) for g in self._groups for layer, forward in g.forwards()]
        places += [place for layer in self._residuals for place in layer.places()]
        places += [(rotary.namespace, _ROTARY, rotary.turned_by(rotate)) for rotary in self._rotaries]
        with put(places), torch.no_grad():
            yield

    def _holds(self, model: CausalLM) -> bool:
        """Whether the whole model gives the same hidden states; by the median token: a router may flip for one."""
        from verl.models.fused_kernels import rotate

        own = _probe(model).float()
        try:
            with self.active(rotate):
                ours = _probe(model).float()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # a slice that can't be viewed as a layer wants it
            return False
        error = ((ours - own).std(-1) / own.std(-1).clamp(min=1e-6)).median()
        is_exact = next(model.backbone.parameters()).dtype == torch.float32
        return bool(error < (1e-3 if is_exact else 0.1))


@dataclass
class _Rotary:
    """The rotary function of a modeling file, and the kinds of cos that it turns halves by: (type, R < D)."""

    namespace: dict[str, Any]
    own: Callable[..., Any]
    kinds: set[tuple[torch.dtype, bool]]

    def turned_by(self, rotate: Rotate) -> Callable[..., Any]:
        """A function to stand in its place: query [1, H, N, D], key [1, K, N, D], cos and sin [1, N, R]."""
        thread, own = threading.get_ident(), self.own

        def apply(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1, **named: Any) -> Any:
            is_packed = query.dim() == 4 and query.shape[0] == 1 and cos.shape[:-1] == (1, query.shape[2])
            is_known = (cos.dtype, cos.shape[-1] < query.shape[-1]) in self.kinds
            if not is_packed or not is_known or unsqueeze_dim != 1 or named or threading.get_ident() != thread:
                return own(query, key, cos, sin, unsqueeze_dim=unsqueeze_dim, **named)
            turned = rotate(query[0].transpose(0, 1), key[0].transpose(0, 1), cos[0], sin[0])
            return tuple(x.transpose(0, 1)[None] for x in turned)

        return apply


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, was_training in training.items():
            part.training = was_training


def _probe(model: CausalLM) -> Tensor:
    """Hidden states of a few tokens."""
    device = next(model.module.parameters()).device
    tokens = torch.arange(7, 15, device=device)
    attention = PackedAttention(torch.tensor([len(tokens)]), device)
    return model.hidden(tokens % model.vocab_size, torch.arange(len(tokens), device=device), attention)


def _norms(module: nn.Module) -> list[tuple[nn.Module, Forward]]:
    """Norms by the root of the mean square, each with its forward; one of a kind is tried."""
    variants: dict[object, tuple[bool, bool] | None] = {}
    found: list[tuple[nn.Module, Forward]] = []
    for part in module.modules():
        eps = vars(part).get("variance_epsilon", vars(part).get("eps"))
        weight = part._parameters.get("weight")
        is_bare = not part._modules and not part._buffers and len(part._parameters) == 1 and "forward" not in vars(part)
        if not is_bare or weight is None or weight.dim() != 1 or not isinstance(eps, float):
            continue
        kind = (type(part), eps, weight.shape, weight.dtype)
        if kind not in variants:
            variants[kind] = _norm_variant(part, weight, eps)
        if (variant := variants[kind]) is not None:
            found.append((part, _norm_forward(part, eps, *variant, weight.dtype)))
    return found


def _norm_variant(part: nn.Module, weight: Tensor, eps: float) -> tuple[bool, bool] | None:
    """(plus_one, rounds_first) by which ``part`` agrees with ours. In float32 rounding shows nowhere."""
    x = _random(4, 3, len(weight), like=weight) + 0.5  # a mean that is no 0, since some norms take it off
    x[0] *= 1e-3  # eps counts
    tensors = {"weight": _random(len(weight), like=weight, seed=1)}
    for plus_one, rounds_first in ((False, True), (True, False), (False, False), (True, True)):
        forward = _norm_forward(part, eps, plus_one, rounds_first, weight.dtype)
        if (both := _both(part, forward, tensors, x)) is not None and _agree(*both):
            return plus_one, rounds_first
    return None


def _norm_forward(part: nn.Module, eps: float, plus_one: bool, rounds_first: bool, dtype: torch.dtype) -> Forward:
    from verl.models.fused_kernels import rms_norm

    own = type(part).forward

    def forward(*inputs: Any, **named: Any) -> Tensor:
        weight: Tensor = part.weight  # type: ignore[assignment]
        if named or len(inputs) != 1 or not inputs[0].dtype == weight.dtype == dtype:
            return own(part, *inputs, **named)  # type: ignore[no-any-return]
        return rms_norm(inputs[0], weight, eps, plus_one=plus_one, rounds_first=rounds_first)

    return forward


def _gated_mlps(module: nn.Module) -> list[tuple[nn.Module, Forward]]:
    """MLPs of the form ``down(activation(gate(x)) * up(x))``, each with its forward; one of a kind is tried."""
    activations: dict[object, str | None] = {}
    found: list[tuple[nn.Module, Forward]] = []
    for part in module.modules():
        layers = {name: child for name, child in part.named_children() if type(child) is nn.Linear}
        names = {f"{name}.{of}" for name, layer in layers.items() for of, _ in layer.named_parameters()}
        is_known = set(layers) in ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})
        if not is_known or names != {name for name, _ in part.named_parameters()} or "forward" in vars(part):
            continue
        kind = (type(part), repr(part))  # with the activation and the sizes
        if kind not in activations:
            activations[kind] = _mlp_activation(part, layers)
        if (activation := activations[kind]) is not None:
            found.append((part, _gated_forward(part, activation)))
    return found


def _mlp_activation(part: nn.Module, layers: dict[str, nn.Linear]) -> str | None:
    """The activation by which ``part`` agrees with ours, on small weights of float32, where no rounding hides it."""
    from verl.models.fused_kernels import ACTIVATIONS

    channels, inner = 24, 40
    outs = {"gate_proj": inner, "up_proj": inner, "gate_up_proj": 2 * inner, "down_proj": channels}
    like = torch.empty(0, device=layers["down_proj"].weight.device)
    tensors = {}
    for seed, (name, layer) in enumerate(layers.items()):
        ins = inner if name == "down_proj" else channels
        tensors[f"{name}.weight"] = 0.3 * _random(outs[name], ins, like=like, seed=seed)
        if layer.bias is not None:
            tensors[f"{name}.bias"] = _random(outs[name], like=like, seed=seed + len(layers))
    for activation in ACTIVATIONS:
        both = _both(part, _gated_forward(part, activation), tensors, _random(1, 8, channels, like=like, seed=9))
        if both is not None and both[0].shape == both[1].shape:
            ours, own = both
            if bool((ours - own).abs().mean() < 1e-5 * own.std()):  # tanh's gelu is 1e-4 from erf's
                return activation
    return None


def _gated_forward(part: nn.Module, activation: str) -> Forward:
    from verl.models.fused_kernels import gated

    own, children = type(part).forward, dict(part.named_children())
    down, joint = children["down_proj"], children.get("gate_up_proj")

    def forward(*inputs: Any, **named: Any) -> Tensor:
        if named or len(inputs) != 1:
            return own(part, *inputs, **named)  # type: ignore[no-any-return]
        if joint is None:
            gate, up = children["gate_proj"](*inputs), children["up_proj"](*inputs)
        else:
            gate, up = joint(*inputs).chunk(2, -1)
        channels = gate.shape[-1]
        inner = gated(gate.reshape(-1, channels), up.reshape(-1, channels), activation)
        out: Tensor = down(inner.view(gate.shape))
        return out

    return forward


def _rotaries(module: nn.Module) -> list[_Rotary]:
    """The rotary functions of the files that ``module``'s attention layers come from, where they turn halves."""
    weight = next(module.parameters())
    files = {}
    for part in module.modules():
        if "layer_idx" in vars(part):  # which every attention layer of transformers has
            owner = next(cls for cls in type(part).__mro__ if "forward" in vars(cls))
            files[owner.__module__] = vars(sys.modules[owner.__module__])
    found = []
    for namespace in files.values():
        own = namespace.get(_ROTARY)
        if callable(own):
            angles = {weight.dtype, torch.float32}
            kinds = {(angle, part) for angle in angles for part in (False, True) if _turns(own, weight, angle, part)}
            found.append(_Rotary(namespace, own, kinds))
    return [rotary for rotary in found if rotary.kinds]


def _turns(own: Callable[..., Any], like: Tensor, angle_dtype: torch.dtype, is_partial: bool) -> bool:
    """Whether ``own`` is our rotation, with cos and sin of that type, on all dims or on some."""
    from verl.models.fused_kernels import rotate

    heads, key_heads, num_tokens, dim = 4, 2, 5, 32
    query, key = (
        _random(1, heads, num_tokens, dim, like=like),
        _random(1, key_heads, num_tokens, dim, like=like, seed=1),
    )
    size = dim // 2 if is_partial else dim
    cos, sin = (_random(1, num_tokens, size, like=like, seed=seed).to(angle_dtype) for seed in (2, 3))
    try:
        theirs = own(query, key, cos, sin)
    except OTHER_KIND:
        return False
    ours = rotate(query[0].transpose(0, 1), key[0].transpose(0, 1), cos[0], sin[0])
    if not isinstance(theirs, tuple) or len(theirs) != 2:
        return False
    return all(_agree(x.transpose(0, 1)[None], y) for x, y in zip(ours, theirs, strict=True))


def _both(part: nn.Module, forward: Forward, tensors: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor] | None:
    """What ``forward`` and ``part`` itself give on ``x`` with ``tensors`` as parameters; None where it takes no x."""
    try:
        own = functional_call(part, tensors, (x,))
        with put([forward_of(part, forward)]):
            return functional_call(part, tensors, (x,)), own
    except torch.OutOfMemoryError:
        raise
    except OTHER_KIND:
        return None


def _agree(ours: Tensor, own: Tensor) -> bool:
    """Within a rounding or two, and in half precision the same at nearly all places."""
    if ours.shape != own.shape or ours.dtype != own.dtype:
        return False
    error = (ours.float() - own.float()).abs()
    limit = 16 * torch.finfo(own.dtype).eps * (1 + own.float().abs())
    is_alike = own.dtype == torch.float32 or bool((ours != own).float().mean() < 0.02)
    return is_alike and bool((error <= limit).all())


def _random(*shape: int, like: Tensor, seed: int = 0) -> Tensor:
    """Normal numbers of the type and on the device of ``like``, from a generator of their own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like.device, like.dtype)
