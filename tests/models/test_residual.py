from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from tests.tiny import FAMILIES, tiny_model
from verl.models.attention import PackedAttention
from verl.models.causal_lm import CausalLM
from verl.models.forwards import put
from verl.models.residual import ResidualLayer, residual_layers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FUSED = {"llama": 2, "qwen2": 2, "qwen3": 2, "mistral": 1, "phi3": 2, "qwen3_moe": 2}


def view_of(family: str, dtype: torch.dtype = torch.float32) -> CausalLM:
    return CausalLM(tiny_model(family).to(DEVICE, dtype))


def hidden_of(model: CausalLM, lengths: tuple[int, ...] = (7, 4)) -> Tensor:
    ids = torch.arange(3, 3 + sum(lengths), device=DEVICE)
    positions = torch.cat([torch.arange(n, device=DEVICE) for n in lengths])
    return model.hidden(ids, positions, PackedAttention(torch.tensor(lengths), DEVICE))


@torch.no_grad()
def layers_of(model: CausalLM) -> list[ResidualLayer]:
    return residual_layers(model.module, lambda: hidden_of(model, (5,)))


@contextmanager
def landing(layers: list[ResidualLayer]) -> Iterator[None]:
    with torch.no_grad(), put([place for layer in layers for place in layer.places()]):
        yield


def arguments(model: CausalLM) -> tuple[Tensor, dict[str, object]]:
    """Of the first layer, as a forward of the model calls it."""
    calls = []
    first = model.backbone.layers[0]
    handle = first.register_forward_pre_hook(lambda _, x, named: calls.append((x[0].clone(), named)), with_kwargs=True)
    with torch.no_grad():
        hidden_of(model)
    handle.remove()
    return calls[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_agree_are_found_and_give_the_same(family: str) -> None:
    model = view_of(family)
    with torch.no_grad():
        before = hidden_of(model)
    layers = layers_of(model)
    assert len(layers) == FUSED.get(family, 0)
    with landing(layers):
        torch.testing.assert_close(hidden_of(model), before, rtol=1e-5, atol=1e-5)
    assert not [part for part in model.module.modules() if "forward" in vars(part) or part._forward_pre_hooks]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once_less(dtype: torch.dtype) -> None:
    exact, model = view_of("llama"), view_of("llama", dtype)
    for of_exact, p in zip(exact.module.parameters(), model.module.parameters(), strict=True):
        of_exact.data.copy_(p)
    layers = layers_of(model)
    assert len(layers) == 2
    h, named = arguments(exact)
    layer, half = model.backbone.layers[0], {**named, "position_embeddings": arguments(model)[1]["position_embeddings"]}
    with torch.no_grad():
        expected, own = exact.backbone.layers[0](h.clone(), **named), layer(h.to(dtype), **half)
    with landing(layers):
        ours = layer(h.to(dtype), **half)
    assert ours.dtype == dtype
    errors = [float((x.float() - expected).std() / expected.std()) for x in (ours, own)]
    assert errors[0] < 2 * torch.finfo(dtype).eps and errors[0] < 1.1 * errors[1]


def test_the_input_is_overwritten() -> None:
    """What a caller keeps of a layer's input is the layer's output afterwards; of its own forward it isn't."""
    model = view_of("qwen3")
    layers = layers_of(model)
    h, named = arguments(model)
    kept, first = h.clone(), model.backbone.layers[0]
    with torch.no_grad():
        expected = first(h, **named)
    assert torch.equal(h, kept)
    with landing(layers):
        out = first(h, **named)
        assert out is h
        torch.testing.assert_close(h, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(first(hidden_states=kept, **named), expected, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_left_to_the_layer_itself() -> None:
    model = view_of("llama")
    layers, first = layers_of(model), model.backbone.layers[0]
    h, named = arguments(model)
    with torch.no_grad():
        expected = first(h, **named)
    strided = torch.stack([h, h], -1)[..., 0]
    trained = h.clone().requires_grad_()
    with landing(layers):
        for x, others in ((strided, named), (trained, named), (h, {**named, "more": None})):
            before = x.detach().clone()
            torch.testing.assert_close(first(x, **others), expected, rtol=1e-5, atol=1e-5)
            assert torch.equal(x, before)
        projection, x = first.self_attn.o_proj, torch.randn(3, 32, device=DEVICE)
        assert torch.equal(projection(x), x @ projection.weight.t())  # called from elsewhere


def test_a_product_of_another_type_is_added_by_the_layer() -> None:
    model = view_of("llama")
    layers, first = layers_of(model), model.backbone.layers[0]
    h, named = arguments(model)
    first.mlp.down_proj.double()
    first.mlp.down_proj.register_forward_pre_hook(lambda _, x: x[0].double())
    with torch.no_grad():
        expected = first(h.clone(), **named)
    with landing(layers):
        out = first(h, **named)
    assert out.dtype == expected.dtype == torch.float64 and out is not h
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("branch, end", [("self_attn", "o_proj"), ("mlp", "down_proj")])
def test_nothing_is_left_of_a_branch_that_failed(branch: str, end: str) -> None:
    model = view_of("llama")
    layers, first = layers_of(model), model.backbone.layers[0]
    h, named = arguments(model)
    with torch.no_grad():
        expected = first(h, **named)

    def fail(*_: object) -> None:
        raise ValueError("in a branch")

    handle = first._modules[branch]._modules[end].register_forward_pre_hook(fail)
    with landing(layers):
        with pytest.raises(ValueError, match="in a branch"):
            first(h.clone(), **named)
        handle.remove()
        weight = first._modules[branch]._modules[end].weight
        x = torch.randn(1, h.shape[1], weight.shape[1], device=DEVICE)  # would fit the place of before
        assert torch.equal(first._modules[branch]._modules[end](x), nn.functional.linear(x, weight))
        torch.testing.assert_close(first(h, **named), expected, rtol=1e-5, atol=1e-5)
    assert not [part for part in model.module.modules() if "forward" in vars(part)]


def add_bias(layer: nn.Module) -> None:
    layer.self_attn.o_proj.bias = nn.Parameter(torch.ones(32, device=DEVICE))


def add_scale(layer: nn.Module) -> None:
    layer.scale = nn.Parameter(torch.ones(1, device=DEVICE))


def watch(layer: nn.Module) -> None:
    layer.self_attn.o_proj.register_forward_hook(lambda *_: None)


def give_another_forward(layer: nn.Module) -> None:
    layer.forward = type(layer).forward.__get__(layer)


def silence(layer: nn.Module) -> None:
    layer.self_attn.o_proj.weight.data.zero_()
    layer.mlp.down_proj.weight.data.zero_()


class Scaled(nn.Module):
    """A branch that does something to what its last projection gives."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.down_proj = inner, inner.down_proj

    def forward(self, x: Tensor) -> Tensor:
        return 0.9 * self.inner(x)


def scale(layer: nn.Module) -> None:
    layer.mlp = Scaled(layer.mlp)


@pytest.mark.parametrize("change", [add_bias, add_scale, watch, give_another_forward, silence, scale])
def test_what_is_not_of_that_form_stays_as_it_is(change) -> None:
    model = view_of("mistral")
    assert len(layers_of(model)) == 1
    change(model.backbone.layers[0])
    assert layers_of(model) == []


def test_the_ends_of_the_mlps_alone_may_differ() -> None:
    model = view_of("llama")
    model.backbone.layers[1].mlp.down_proj.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        before = hidden_of(model)
    layers = layers_of(model)
    assert [len(layer.places()) for layer in layers] == [3, 2]
    with landing(layers):
        torch.testing.assert_close(hidden_of(model), before, rtol=1e-5, atol=1e-5)
