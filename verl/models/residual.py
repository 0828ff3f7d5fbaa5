"""Products that land in the residual stream: the last projection of a branch adds to it, in place of product and sum.

Decoder layers are found by their structure, ``h += self_attn(norm(h)); h += mlp(norm(h))``, and each kind is tried
against its own forward on what it gets in a forward of the module; what doesn't agree stays as it is. No gradients.
A layer's input is overwritten: only for a module that doesn't read it again, which the caller checks on the whole.

Shape letters: N packed tokens, C channels, I inputs of a projection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as product

from verl.models.forwards import OTHER_KIND, Place, forward_of, put

_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


class ResidualLayer:
    """A decoder layer whose branches end in the residual stream.

    names  what the layer is called with besides its hidden states; called otherwise, it does what it does by itself
    """

    def __init__(self, layer: nn.Module, names: frozenset[str]) -> None:
        self._layer, self._names, self._parts = layer, names, dict(layer.named_children())
        self._attention, self._mlp = _Landing(_last(layer, "self_attn")), _Landing(_last(layer, "mlp"))

    def places(self) -> list[Place]:
        """Forwards for the layer and the last projections of its branches. One thread at a time."""
        ends = [(end.layer, end.forward) for end in (self._attention, self._mlp) if end.layer is not None]
        return [forward_of(self._layer, self._forward), *(forward_of(*end) for end in ends)]

    def _forward(self, hidden_states: Tensor, *others: Any, **named: Any) -> Tensor:
        """hidden_states [1, N, C]; overwritten and returned, where contiguous and without gradients."""
        if others or named.keys() != self._names:
            own: Tensor = type(self._layer).forward(self._layer, hidden_states, *others, **named)
            return own
        h, parts = hidden_states, self._parts
        attended = self._attention.add(
            h, lambda: parts["self_attn"](hidden_states=parts["input_layernorm"](h), **named)[0]
        )
        return self._mlp.add(attended, lambda: parts["mlp"](parts["post_attention_layernorm"](attended)))


class _Landing:
    """The end of a branch: its last projection, if that is a plain one, and where its product is to be added."""

    def __init__(self, layer: nn.Linear | None) -> None:
        self.layer = layer
        self._place: Tensor | None = None

    def add(self, residual: Tensor, branch: Callable[[], Tensor]) -> Tensor:
        """``residual + branch()`` [1, N, C]: ``residual`` itself, where the last product could be added to it."""
        self._place = residual
        try:
            out = branch()
            is_added = self._place is None
        finally:
            self._place = None
        return residual if is_added else residual + out

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I]; returns [..., C]: the product, or, once in a branch, the residual with the product in it."""
        assert self.layer is not None
        weight, place = self.layer.weight, self._place
        if place is None or not _fits(place, x, weight):
            own: Tensor = product(x, weight)
            return own
        self._place = None
        place.view(-1, len(weight)).addmm_(x.reshape(-1, x.shape[-1]), weight.t())
        return place


def _fits(place: Tensor, x: Tensor, weight: Tensor) -> bool:
    """Whether the product of ``x`` [..., I] and ``weight`` [C, I] can be added to ``place`` in its memory."""
    is_like = place.shape == (*x.shape[:-1], len(weight)) and place.dtype == x.dtype == weight.dtype
    return is_like and place.is_contiguous() and not place.requires_grad


def residual_layers(module: nn.Module, run: Callable[[], object]) -> list[ResidualLayer]:
    """Decoder layers of ``module`` that can add to their input; one of a kind is tried, on what ``run`` gives it.

    run  a forward of ``module``
    """
    candidates = [part for part in module.modules() if _is_candidate(part)]
    kinds = {(type(part), repr(part)): part for part in reversed(candidates)}
    names = {kind: _agreed_names(part, run) for kind, part in kinds.items()}
    agreed = [(part, names[type(part), repr(part)]) for part in candidates]
    return [ResidualLayer(part, found) for part, found in agreed if found is not None]


def _is_candidate(part: nn.Module) -> bool:
    weighted = {name.partition(".")[0] for name, _ in part.named_parameters()}
    return weighted == _PARTS and "forward" not in vars(part) and _last(part, "self_attn") is not None


def _last(layer: nn.Module, branch: str) -> nn.Linear | None:
    """The last projection of a branch of ``layer``; None where it isn't a bare product, as among experts."""
    names = {"self_attn": "o_proj", "mlp": "down_proj"}
    end = layer._modules[branch]._modules.get(names[branch])  # type: ignore[union-attr]
    if type(end) is not nn.Linear or end.bias is not None or "forward" in vars(end):
        return None
    return None if end._forward_hooks else end  # who watches it wants the product


def _agreed_names(part: nn.Module, run: Callable[[], object]) -> frozenset[str] | None:
    """The names of what ``run`` calls ``part`` with besides its hidden states; None where ours isn't what it gives."""
    calls: list[tuple[Tensor, dict[str, Any]]] = []

    def note(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        rest = {name: value for name, value in named.items() if name != "hidden_states"}
        positional = (*inputs, named["hidden_states"]) if "hidden_states" in named else inputs
        if len(positional) == 1:
            calls.append((positional[0].clone(), rest))

    handle = part.register_forward_pre_hook(note, with_kwargs=True)
    try:
        run()
    finally:
        handle.remove()
    if not calls:
        return None
    before, named = calls[0]
    names = frozenset(named)
    try:
        own = part(before.clone(), **named)
        with put(ResidualLayer(part, names).places()):
            ours = part(before.clone(), **named)
    except torch.OutOfMemoryError:
        raise
    except OTHER_KIND:
        return None
    return names if isinstance(own, Tensor) and _agree(ours, own, before) else None


def _agree(ours: Tensor, own: Tensor, before: Tensor) -> bool:
    """Within rounding, by what the layer adds to its input; a layer that adds nothing shows nothing."""
    if ours.shape != own.shape or ours.dtype != own.dtype:
        return False
    error, added = (ours.float() - own.float()).std(), (own.float() - before.float()).std()
    return bool(error < max(1e-3, 4 * torch.finfo(own.dtype).eps) * added)
