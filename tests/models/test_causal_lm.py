from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from tests.tiny import FAMILIES, VOCAB, tiny_model
from verl.common.errors import UnsupportedModel
from verl.models.attention import ATTENTION, PackedAttention
from verl.models.causal_lm import CausalLM

LENGTHS = [9, 1, 14, 3]


def rows_of_ids() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (n,), generator=generator) for n in LENGTHS]


def packed_logits(lm: CausalLM, rows: list[Tensor]) -> list[Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    with torch.no_grad():
        hidden = lm.hidden(torch.cat(rows), positions, PackedAttention(lengths, torch.device("cpu")))
        return list(lm.logits(hidden).split(lengths.tolist()))


def plain_logits(module: PreTrainedModel, row: Tensor) -> Tensor:
    module.set_attn_implementation("eager")
    with torch.no_grad():
        logits: Tensor = module(input_ids=row[None], use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_rows_equal_each_row_by_the_plain_module(family: str) -> None:
    """Neighbours, their order and windows shorter than a row change nothing."""
    rows = rows_of_ids()
    expected = [plain_logits(tiny_model(family), row) for row in rows]
    lm = CausalLM(tiny_model(family))
    for order in ([0, 1, 2, 3], [3, 2, 0, 1], [2]):
        found = packed_logits(lm, [rows[i] for i in order])
        for i, logits in zip(order, found, strict=True):
            torch.testing.assert_close(logits, expected[i], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_gradients_equal_those_of_the_plain_module(family: str) -> None:
    rows = rows_of_ids()
    plain = tiny_model(family)
    plain.set_attn_implementation("eager")
    sum(plain(input_ids=row[None], use_cache=False).logits.square().sum() for row in rows).backward()
    module = tiny_model(family)
    lm = CausalLM(module)
    lengths = torch.tensor(LENGTHS)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    lm.logits(
        lm.hidden(torch.cat(rows), positions, PackedAttention(lengths, torch.device("cpu")))
    ).square().sum().backward()
    for (name, parameter), other in zip(module.named_parameters(), plain.parameters(), strict=True):
        scale = float(other.grad.abs().max()) + 1e-6
        assert float((parameter.grad - other.grad).abs().max()) / scale < 1e-4, name


def test_the_module_stays_the_users_own() -> None:
    module = tiny_model("llama")
    before = {name: (p.data_ptr(), p.clone()) for name, p in module.named_parameters()}
    lm = CausalLM(module)
    assert lm.module is module and module.config._attn_implementation == ATTENTION
    for name, parameter in module.named_parameters():
        assert parameter.data_ptr() == before[name][0] and torch.equal(parameter, before[name][1])
    CausalLM(module)  # a second view of it is as good as the first


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_and_the_mode_stays(training: bool) -> None:
    config = AutoConfig.for_model(
        "gpt2", vocab_size=VOCAB, n_embd=32, n_head=2, n_layer=2, n_positions=64, resid_pdrop=0.5, embd_pdrop=0.5,
        attn_pdrop=0.5,
    )  # fmt: skip
    module = AutoModelForCausalLM.from_config(config).train(training)
    lm = CausalLM(module)
    assert module.training is training
    module.train()
    one, other = (packed_logits(lm, rows_of_ids()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Scaled(nn.Module):
    """An output head with a step of its own."""

    def __init__(self, head: nn.Module, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.head, self.step = head, step

    @property
    def weight(self) -> Tensor:
        return self.head.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return self.step(self.head(hidden))


def with_forward(change: Callable[[Any], None]) -> PreTrainedModel:
    """A tiny model whose forward changes its output in a way that nothing of it declares."""
    module = tiny_model("llama")
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        change(out)
        return out

    module.forward = forward
    return module


@pytest.mark.parametrize("factor", [0.5, 1.2, -1.0])
def test_a_hidden_scaling_of_the_logits_is_refused_by_name(factor: float) -> None:
    def scale(out: Any) -> None:
        out.logits = out.logits * factor

    with pytest.raises(UnsupportedModel, match="'llama'"):
        CausalLM(with_forward(scale))


def test_an_undeclared_softcap_is_refused() -> None:
    def softcap(out: Any) -> None:
        out.logits = 3 * torch.tanh(out.logits / 3)

    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM"):
        CausalLM(with_forward(softcap))


def test_a_declared_scaling_is_followed() -> None:
    """Granite divides its logits; the check would refuse it if that were forgotten."""
    module = tiny_model("granite")
    expected = plain_logits(tiny_model("granite"), rows_of_ids()[0])
    (found,) = packed_logits(CausalLM(module), rows_of_ids()[:1])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_config_that_claims_another_scaling_is_refused() -> None:
    module = tiny_model("llama")
    module.config.logits_scaling = 2.0  # a llama doesn't read it
    with pytest.raises(UnsupportedModel, match="'llama'"):
        CausalLM(module)


def test_what_is_no_causal_language_model() -> None:
    config = AutoConfig.for_model("llama", vocab_size=VOCAB, num_labels=1, pad_token_id=0, **FAMILIES["llama"])
    with pytest.raises(UnsupportedModel, match=r"'llama' .* no causal language model"):
        CausalLM(AutoModelForSequenceClassification.from_config(config))


def test_a_head_that_is_a_module_of_its_own_works_when_it_is_the_models() -> None:
    module = tiny_model("llama")
    module.lm_head = Scaled(module.lm_head, lambda logits: logits * 2)
    expected = plain_logits(module, rows_of_ids()[0])
    (found,) = packed_logits(CausalLM(module), rows_of_ids()[:1])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def of_family(name: str, **keys: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, vocab_size=VOCAB, **{**SMALL, **keys})
    module: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return module


@pytest.mark.parametrize(
    ("name", "keys", "reason"),
    [
        ("bloom", {}, "4 of its 4 layers"),
        ("falcon", {}, "4 of its 4 layers"),
        ("mamba", {}, "4 of its 4 layers"),
        ("minimax", {"head_dim": 16}, "2 of its 4 layers"),
        ("qwen3_next", {"head_dim": 16}, "3 of its 4 layers"),
        ("stablelm", {}, "don't hand their attention"),
        ("mpt", {"d_model": 32, "n_heads": 2, "n_layers": 2}, "MptForCausalLM"),
        ("modernbert-decoder", {}, "ModernBertDecoderForCausalLM"),
        ("gpt_oss", {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}, "its attention has a step"),
        ("phimoe", {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 10}, "sliding window of 10"),
    ],
)
def test_layers_that_would_mix_rows_are_refused_by_name(name: str, keys: dict[str, Any], reason: str) -> None:
    """One row alone often comes out right under them; two packed rows, or the next token, don't."""
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        CausalLM(of_family(name, **keys))
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}),
        ("cohere2", {"sliding_window": 5}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 5}),
        ("starcoder2", {"sliding_window": 5}),
        ("gpt_neox", {}),
    ],
)
def test_families_beside_the_usual_ones(name: str, keys: dict[str, Any]) -> None:
    rows = rows_of_ids()
    expected = [plain_logits(of_family(name, **keys), row) for row in rows]
    for logits, plain in zip(packed_logits(CausalLM(of_family(name, **keys)), rows), expected, strict=True):
        torch.testing.assert_close(logits, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.5}),
        ("starcoder2", {"residual_dropout": 0.5, "embedding_dropout": 0.5}),
        ("biogpt", {"hidden_dropout_prob": 0.5}),
        ("mixtral", {"num_local_experts": 2, "router_jitter_noise": 0.5}),
    ],
)
def test_dropout_and_noise_that_are_plain_numbers_are_off(name: str, keys: dict[str, Any]) -> None:
    module = of_family(name, **keys)
    lm = CausalLM(module)
    sampler = packed_logits(lm, rows_of_ids())
    module.train()
    for one, other in zip(packed_logits(lm, rows_of_ids()), sampler, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
