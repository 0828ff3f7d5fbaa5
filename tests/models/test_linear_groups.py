from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.tiny import tiny_model
from verl.engines.saved_model import save_model
from verl.models.linear_groups import LinearGroup, shared_inputs


class Three(nn.Module):
    """Two layers on one input, and a third on a copy of it."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, outs, bias=bias) for outs in (4, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x), self.b(x), self.c(x.clone())], -1)


def three(seed: int = 0, **options: bool) -> Three:
    torch.manual_seed(seed)
    return Three(**options)


def groups_of(module: nn.Module) -> list[LinearGroup]:
    return shared_inputs(module, lambda: module(torch.ones(2, 6)))


def names(module: nn.Module, groups: list[LinearGroup]) -> list[list[str]]:
    known = {layer: name for name, layer in module.named_modules()}
    return [[known[layer] for layer in group.layers] for group in groups]


def tokens_through(model: PreTrainedModel) -> Tensor:
    return model(input_ids=torch.arange(5)[None], use_cache=False).logits


def test_layers_that_read_one_tensor_are_a_group() -> None:
    module = three()
    assert names(module, groups_of(module)) == [["a", "b"]]


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # without and with biases
def test_weights_side_by_side_are_the_same_parameters(family: str) -> None:
    model = tiny_model(family)
    parameters, before = dict(model.named_parameters()), {k: v.clone() for k, v in model.state_dict().items()}
    logits = tokens_through(model)
    groups = shared_inputs(model, lambda: tokens_through(model))
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    of_first_layer = [[f"{attention}{x}_proj" for x in "qkv"], [f"{mlp}gate_proj", f"{mlp}up_proj"]]
    assert names(model, groups)[:2] == of_first_layer and len(groups) == 4
    for group in groups:
        for kind in ("weight", "bias") if group.layers[0].bias is not None else ("weight",):
            storages = [getattr(layer, kind).untyped_storage() for layer in group.layers]
            assert len({storage.data_ptr() for storage in storages}) == 1
            assert storages[0].nbytes() == sum(getattr(layer, kind).nbytes for layer in group.layers)
    assert all(parameters[name] is p for name, p in model.named_parameters())
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(tokens_through(model), logits)


def test_a_second_search_moves_nothing() -> None:
    model = tiny_model("qwen2")
    first = shared_inputs(model, lambda: tokens_through(model))
    addresses = [p.data_ptr() for p in model.parameters()]
    second = shared_inputs(model, lambda: tokens_through(model))
    assert names(model, first) == names(model, second)
    assert addresses == [p.data_ptr() for p in model.parameters()]


def make_tied(module: Three) -> None:
    module.table = nn.Embedding(2, 6)
    module.table.weight = module.b.weight


def make_hooked(module: Three) -> None:
    module.b.register_forward_hook(lambda layer, inputs, out: 2 * out)


def make_other_forward(module: Three) -> None:
    module.b.forward = lambda x: x[..., :2]  # type: ignore[method-assign]


def make_mixed(module: Three) -> None:
    module.b.bias = None  # type: ignore[assignment]


def make_subclass(module: Three) -> None:
    module.b = nn.modules.linear.NonDynamicallyQuantizableLinear(6, 2)


def make_part_of_more(module: Three) -> None:
    whole = torch.ones(5, 6)
    module.b.weight.data = whole[1:3]


def make_called_twice(module: Three) -> None:
    forward = module.forward
    module.forward = lambda x: forward(x) + forward(x)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "change",
    [make_tied, make_hooked, make_other_forward, make_mixed, make_subclass, make_part_of_more, make_called_twice],
)
def test_what_is_not_plain_stays_where_it_is(change) -> None:
    module = three()
    change(module)
    addresses = [p.data_ptr() for p in module.parameters()]
    assert groups_of(module) == []
    assert addresses == [p.data_ptr() for p in module.parameters()]


def test_a_storage_next_door_is_not_the_same_storage() -> None:
    module = three(bias=False)
    whole = torch.randn(6, 6)
    module.a.weight.data, module.b.weight.data = whole[:4], whole[4:]
    assert names(module, groups_of(module)) == [["a", "b"]] and module.a.weight.data_ptr() == whole.data_ptr()
    module.a.weight.data, module.b.weight.data = whole[2:], whole[:2]  # in one storage, in the other order
    assert groups_of(module) == []


@torch.no_grad()
def test_forwards_are_slices_of_one_product() -> None:
    module, x = three(), torch.randn(3, 6)
    expected = module.a(x), module.b(x)
    (group,) = groups_of(module)
    (_, lead), (_, follow) = group.forwards()
    first, second = lead(x), follow(x)
    torch.testing.assert_close((first, second), expected)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.stride() == second.stride() == (6, 1)


@torch.no_grad()
def test_another_input_gets_a_product_of_its_own() -> None:
    module, x, y = three(), torch.randn(3, 6), torch.randn(3, 6)
    (group,) = groups_of(module)
    (_, lead), (_, follow) = group.forwards()
    torch.testing.assert_close(follow(y), module.b(y))  # before any
    lead(x)
    torch.testing.assert_close(follow(y), module.b(y))
    torch.testing.assert_close(follow(x), module.b(x))  # is still there
    torch.testing.assert_close(follow(x), module.b(x))  # was handed out: once more by itself
    lead(x), lead(y)
    torch.testing.assert_close(follow(y), module.b(y))


@torch.no_grad()
def test_nothing_is_held_after_the_last_slice() -> None:
    (group,) = groups_of(three())
    (_, lead), (_, follow) = group.forwards()
    x = torch.randn(3, 6)
    product = weakref.ref(lead(x).untyped_storage()), weakref.ref(x)
    out = follow(x)
    del x, out
    gc.collect()
    assert [ref() for ref in product] == [None, None]


@torch.no_grad()
def test_new_weights_are_seen_and_moved_ones_are_let_go() -> None:
    module, x = three(), torch.randn(3, 6)
    (group,) = groups_of(module)
    module.load_state_dict(three(seed=5).state_dict())
    (_, lead), (_, follow) = group.forwards()
    torch.testing.assert_close((lead(x), follow(x)), (three(seed=5).a(x), three(seed=5).b(x)))
    module.b.weight.add_(1.0)
    torch.testing.assert_close((lead(x), follow(x)), (module.a(x), module.b(x)))
    module.double()
    assert group.forwards() == []
    assert names(module, shared_inputs(module, lambda: module(torch.ones(2, 6).double()))) == [["a", "b"]]


def test_training_goes_on_as_if_nothing_had_moved() -> None:
    plain, moved = three(), three()
    seen = []
    moved.a.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum()))
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (plain, moved)]
    for step in range(4):
        for module, optimizer in zip((plain, moved), optimizers, strict=True):
            optimizer.zero_grad()
            module(torch.arange(12.0).view(2, 6) / 6).square().sum().backward()
            optimizer.step()
        if step == 1:  # moments exist, the next gradients don't
            versions = [p._version for p in moved.parameters()]
            assert len(groups_of(moved)) == 1
            assert [p._version for p in moved.parameters()] == versions
    assert len(seen) == 4 and moved.a.weight._version > versions[0]
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), moved.parameters(), strict=True))
    assert moved.a.weight.untyped_storage().data_ptr() == moved.b.weight.untyped_storage().data_ptr()


def test_what_is_saved_is_what_would_have_been_saved(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    model.save_pretrained(tmp_path / "before")
    assert len(shared_inputs(model, lambda: tokens_through(model))) == 4
    model.save_pretrained(tmp_path / "after")
    save_model(tmp_path / "checkpoint", model, None)
    save_model(tmp_path / "bfloat16", model, None, dtype=torch.bfloat16)
    before = (tmp_path / "before" / "model.safetensors").read_bytes()
    assert before == (tmp_path / "after" / "model.safetensors").read_bytes()
    assert before == (tmp_path / "checkpoint" / "model.safetensors").read_bytes()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "bfloat16")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16()), name
    torch.save(model.state_dict(), tmp_path / "state.pt")
    fresh = tiny_model("qwen2", seed=1)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt"))
    twin = copy.deepcopy(model)
    assert torch.equal(tokens_through(fresh), tokens_through(model))
    assert torch.equal(tokens_through(twin), tokens_through(model))
