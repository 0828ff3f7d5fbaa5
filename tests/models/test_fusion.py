from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from tests.tiny import FAMILIES, tiny_model
from verl.models.attention import PackedAttention
from verl.models.causal_lm import CausalLM
from verl.models.fused_kernels import rotate
from verl.models.fusion import Fusion
from verl.models.lora import LoraConfig, add_adapter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # Triton's interpreter cuts bfloat16 off

# layers x (norms, MLPs, groups), one rotary function, and layers that add to their input
FUSED = {
    "gpt2": (0, 0, 0, 0, 0),
    "llama": (5, 2, 4, 1, 2),
    "qwen2": (5, 2, 4, 1, 2),
    "qwen3": (9, 2, 4, 1, 2),
    "mistral": (3, 1, 2, 1, 1),
    "gemma2": (9, 2, 4, 1, 0),
    "gemma3_text": (13, 2, 4, 1, 0),
    "phi3": (5, 2, 0, 1, 2),  # query, key and value are one layer, gate and up another
    "olmo2": (9, 2, 4, 1, 0),
    "granite": (5, 2, 4, 1, 0),
    "qwen3_moe": (9, 0, 2, 1, 2),  # experts stay as they are, and are added by themselves
}


def view_of(module: PreTrainedModel, dtype: torch.dtype = torch.float32) -> CausalLM:
    return CausalLM(module.to(DEVICE, dtype))


def hidden_of(model: CausalLM, lengths: tuple[int, ...] = (7, 4)) -> Tensor:
    """Hidden states of rows of ``lengths``, packed."""
    ids = torch.arange(3, 3 + sum(lengths), device=DEVICE)
    positions = torch.cat([torch.arange(n, device=DEVICE) for n in lengths])
    return model.hidden(ids, positions, PackedAttention(torch.tensor(lengths), DEVICE))


def fused_hidden_of(model: CausalLM, fusion: Fusion) -> Tensor:
    with fusion.active(rotate):
        return hidden_of(model)


def rotary_of(model: CausalLM) -> object:
    return vars(sys.modules[type(model.module).__module__])["apply_rotary_pos_emb"]


def own_forwards(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if "forward" in vars(part)]


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_hidden_states_are_the_same(family: str) -> None:
    model = view_of(tiny_model(family))
    with torch.no_grad():
        before = hidden_of(model)
    fusion = Fusion(model)
    assert tuple(fusion.counts.values()) == FUSED[family]
    calls = []

    def counted(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        calls.append([list(x.shape) for x in tensors])
        return rotate(*tensors)

    with fusion.active(counted):
        assert len(own_forwards(model.module)) >= sum(FUSED[family][:3])
        torch.testing.assert_close(hidden_of(model), before, rtol=1e-5, atol=1e-5)
    config = model.module.config
    assert len(calls) == (config.num_hidden_layers if FUSED[family][3] else 0)
    if calls:
        (_, heads, dim), (_, key_heads, _), (_, rotated), _ = calls[0]
        assert (heads, key_heads) == (config.num_attention_heads, config.num_key_value_heads)
        assert {tokens for shapes in calls for tokens, *_ in shapes} == {11} and rotated == dim
    with torch.no_grad():
        torch.testing.assert_close(hidden_of(model), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"], ["o_proj", "down_proj"], ["up_proj"]])
def test_an_adapter_that_learns_later_is_not_fused_away(targets: str | list[str]) -> None:
    """At first its product is 0, so a fusion that left it out would agree with the module."""
    pytest.importorskip("peft")
    module = tiny_model("llama")
    add_adapter(module, LoraConfig(rank=2, target_modules=targets), base="nowhere", seed=0)
    model = view_of(module)
    fusion = Fusion(model)
    assert fusion.counts["norms"] == 5 and fusion.counts["rotaries"] == 1
    base = hidden_of(model).detach()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.3)
        after = hidden_of(model)
    assert float((after - base).abs().max()) > 1e-2
    torch.testing.assert_close(fused_hidden_of(model, fusion), after, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2"])
def test_half_precision_rounds_where_the_module_rounds(family: str) -> None:
    """All three norms are alike in float32; in half precision each takes its own variant, and products round alike."""
    model = view_of(tiny_model(family, std=0.1), HALF)
    fusion = Fusion(model)
    assert tuple(fusion.counts.values()) == FUSED[family]
    with torch.no_grad():
        before = hidden_of(model)
    after = fused_hidden_of(model, fusion)
    assert after.dtype == HALF
    error = (after - before).float().std() / before.float().std()
    assert float(error) < 4 * torch.finfo(HALF).eps
    norms = [part for part in model.backbone.modules() if isinstance(part, type(model.backbone.norm))]
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE, HALF)
    with torch.no_grad():
        expected = [norm(x) if norm.weight.shape == (32,) else None for norm in norms]
    with fusion.active(rotate):
        for norm, own in zip(norms, expected, strict=True):
            assert own is None or float((norm(x) != own).float().mean()) < 0.02


def test_rotary_on_some_dims() -> None:
    config = AutoConfig.for_model(
        "phi3", vocab_size=64, pad_token_id=0, partial_rotary_factor=0.5, **{**FAMILIES["phi3"], "hidden_size": 32}
    )
    torch.manual_seed(0)
    model = view_of(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    with torch.no_grad():
        before = hidden_of(model)
    fusion, shapes = Fusion(model), set()

    def noted(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        shapes.add((tensors[0].shape[-1], tensors[2].shape[-1]))
        return rotate(*tensors)

    with fusion.active(noted):
        torch.testing.assert_close(hidden_of(model), before, rtol=1e-5, atol=1e-5)
    assert shapes == {(16, 8)}


def test_a_call_of_another_form_goes_to_the_function_itself() -> None:
    model = view_of(tiny_model("llama"))
    fusion, own = Fusion(model), rotary_of(model)
    q, k = torch.randn(2, 2, 5, 16, device=DEVICE), torch.randn(2, 1, 5, 16, device=DEVICE)
    cos, sin = torch.randn(2, 5, 16, device=DEVICE), torch.randn(2, 5, 16, device=DEVICE)
    across = [x[:1].transpose(1, 2) for x in (q, k)]

    def forbidden(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("called")

    with fusion.active(forbidden):
        ours = rotary_of(model)
        assert torch.equal(ours(q, k, cos, sin)[0], own(q, k, cos, sin)[0])  # two rows
        both = [f(*across, cos[:1], sin[:1], unsqueeze_dim=2)[1] for f in (ours, own)]
        assert torch.equal(*both)
        found = []
        other = threading.Thread(target=lambda: found.append(ours(q[:1], k[:1], cos[:1], sin[:1])[0]))
        other.start()
        other.join()
        assert torch.equal(found[0], own(q[:1], k[:1], cos[:1], sin[:1])[0])
        with pytest.raises(AssertionError, match="called"):
            ours(q[:1], k[:1], cos[:1], sin[:1])


def test_everything_is_put_back_whatever_happens() -> None:
    model = view_of(tiny_model("qwen3").train())
    own = rotary_of(model)
    fusion = Fusion(model)
    assert all(part.training for part in model.module.modules())
    assert not own_forwards(model.module) and rotary_of(model) is own
    with pytest.raises(ValueError, match="inside"), fusion.active(rotate):
        assert rotary_of(model) is not own
        raise ValueError("inside")
    assert not own_forwards(model.module) and rotary_of(model) is own and torch.is_grad_enabled()

    def failing(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        raise ValueError("in a layer")

    with pytest.raises(ValueError, match="in a layer"), fusion.active(failing):
        hidden_of(model)
    assert not own_forwards(model.module) and rotary_of(model) is own
    with torch.no_grad():
        torch.testing.assert_close(fused_hidden_of(model, fusion), hidden_of(model), rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_module_itself() -> None:
    module = tiny_model("gemma2")
    plain, model = view_of(tiny_model("gemma2")), view_of(module)
    fusion = Fusion(model)
    for view in (plain, model):
        hidden_of(view).square().mean().backward()
        if view is model:
            assert not fused_hidden_of(model, fusion).requires_grad
        hidden_of(view).square().mean().backward()
    for (name, p), q in zip(plain.module.named_parameters(), module.parameters(), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, msg=name, rtol=1e-5, atol=1e-6)


def test_one_block_inside_another() -> None:
    model = view_of(tiny_model("llama"))
    fusion = Fusion(model)
    calls = []

    def called(name: str):
        def turn(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            calls.append(name)
            return rotate(*tensors)

        return turn

    with torch.no_grad():
        before = hidden_of(model)
    with fusion.active(called("outer")):
        hidden_of(model)
        with fusion.active(called("inner")):
            hidden_of(model)
        torch.testing.assert_close(hidden_of(model), before, rtol=1e-5, atol=1e-5)
    assert calls == ["outer"] * 2 + ["inner"] * 2 + ["outer"] * 2
    assert not own_forwards(model.module)


def test_a_second_fusion_moves_nothing_and_finds_the_same() -> None:
    model = view_of(tiny_model("qwen2"))
    first = Fusion(model)
    addresses = [p.data_ptr() for p in model.module.parameters()]
    assert Fusion(model).counts == first.counts
    assert addresses == [p.data_ptr() for p in model.module.parameters()]


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "phi3"])
def test_new_weights_are_seen(family: str) -> None:
    model, other = view_of(tiny_model(family)), view_of(tiny_model(family, seed=1))
    fusion = Fusion(model)
    before = fused_hidden_of(model, fusion)
    model.module.load_state_dict(other.module.state_dict())
    with torch.no_grad():
        expected = hidden_of(other)
        assert float((expected - before).abs().max()) > 0.1
    torch.testing.assert_close(fused_hidden_of(model, fusion), expected, rtol=1e-5, atol=1e-5)
    optimizers = [torch.optim.SGD(view.module.parameters(), lr=0.01) for view in (model, other)]
    for view, optimizer in zip((model, other), optimizers, strict=True):
        hidden_of(view).square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        moved = hidden_of(other)
    assert float((moved - expected).abs().max()) > 1e-3
    torch.testing.assert_close(fused_hidden_of(model, fusion), moved, rtol=1e-4, atol=1e-4)


def test_weights_that_moved_away_are_read_where_they_are() -> None:
    model = view_of(tiny_model("llama"))
    fusion = Fusion(model)
    twin = view_of(tiny_model("llama", seed=1))
    for parameter, new in zip(model.module.parameters(), twin.module.parameters(), strict=True):
        parameter.data = new.data.clone()
    with torch.no_grad():
        expected = hidden_of(twin)
    torch.testing.assert_close(fused_hidden_of(model, fusion), expected, rtol=1e-5, atol=1e-5)


def test_saved_after_fusing_it_loads_as_it_was(tmp_path: Path) -> None:
    model = view_of(tiny_model("llama"))
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    fusion = Fusion(model)
    with fusion.active(rotate):
        model.module.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor.cpu()) for name, tensor in before.items())
    assert len(loaded) == len(before)


class CenteredNorm(nn.Module):
    """What looks like a norm by the mean square, and takes the mean off."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (32,), self.weight, None, self.eps)


def test_what_does_not_agree_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny_model("llama")
    layers = module.model.layers
    layers[0].input_layernorm = CenteredNorm()
    layers[0].mlp.act_fn = nn.GELU()  # the exact one, 1e-4 from that with tanh
    layers[1].mlp.act_fn = nn.GELU(approximate="tanh")
    file = sys.modules[type(module).__module__]
    own = file.apply_rotary_pos_emb
    monkeypatch.setattr(file, "apply_rotary_pos_emb", lambda q, k, cos, sin: own(q, k, cos, -sin))
    model = view_of(module)
    fusion = Fusion(model)
    assert fusion.counts == {"norms": 4, "mlps": 1, "groups": 4, "rotaries": 0, "residuals": 2}
    with torch.no_grad():
        expected = hidden_of(model)
    torch.testing.assert_close(fused_hidden_of(model, fusion), expected, rtol=1e-5, atol=1e-5)


class Flattened(nn.Module):
    """A step that takes no slice of a wider tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1).view(x.shape)


def test_a_model_that_takes_no_slices_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    module = tiny_model("qwen3")
    module.model.layers[0].self_attn.k_norm = Flattened()
    model = view_of(module)
    with caplog.at_level(logging.INFO, "verl"):
        fusion = Fusion(model)
    assert not any(fusion.counts.values())
    assert caplog.records[0].message == "qwen3: its layers differ when they are fused; it runs as it is"
    assert caplog.records[1].message == "qwen3: fused 0 norms, 0 mlps, 0 groups, 0 rotaries, 0 residuals"
    with torch.no_grad():
        assert torch.equal(fused_hidden_of(model, fusion), hidden_of(model))


class FromEmbeddings(nn.Module):
    """A last norm that reads the first layer's input once more."""

    def __init__(self, inner: nn.Module, embedding: nn.Module) -> None:
        super().__init__()
        self.inner, self.kept = inner, torch.empty(0)
        embedding.register_forward_hook(self.keep)

    def keep(self, _: nn.Module, inputs: tuple[Tensor], out: Tensor) -> None:
        self.kept = out

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 0.1 * self.kept


def test_a_model_that_reads_a_layers_input_again_keeps_it_and_the_rest_is_fused() -> None:
    module = tiny_model("llama")
    module.model.norm = FromEmbeddings(module.model.norm, module.model.embed_tokens)
    model = view_of(module)
    with torch.no_grad():
        before = hidden_of(model)
    fusion = Fusion(model)
    assert tuple(fusion.counts.values()) == (*FUSED["llama"][:4], 0)
    torch.testing.assert_close(fused_hidden_of(model, fusion), before, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_layers_add_to_the_embeddings_of_a_module_in_training() -> None:
    module = tiny_model("llama").train()
    fusion, embeddings = Fusion(model := view_of(module)), []
    module.model.embed_tokens.register_forward_hook(lambda _, ids, out: embeddings.append((out, out.clone())))
    module.model.layers[-1].register_forward_hook(lambda _, h, out: embeddings.append((out, out)))
    with torch.enable_grad(), fusion.active(rotate):
        hidden_of(model)
    (first, before), (last, _) = embeddings
    assert last is first and not torch.equal(first, before)
    with torch.inference_mode():
        expected = hidden_of(model)
        torch.testing.assert_close(fused_hidden_of(model, fusion), expected, rtol=1e-5, atol=1e-5)


def test_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Fusion.supported(torch.device("cuda"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert Fusion.supported(torch.device("cpu"))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not Fusion.supported(torch.device("cpu"))
