from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny import VOCAB, tiny_model
from verl.observe.flops import ModelShape, forward_flops, mfu, peak_flops, training_flops


def test_formula_by_hand() -> None:
    shape = ModelShape(active_parameters=100, attention_width=8, windows=(None, 2))
    # lengths 3 and 1: 4 tokens; pairs 6 + 1 without a window, (1 + 2 + 2) + 1 with a window of 2
    assert forward_flops(shape, [3, 1]) == 2 * 100 * 4 + 4 * 8 * (7 + 6)
    assert training_flops(shape, [3, 1]) == 3 * forward_flops(shape, [3, 1])
    assert forward_flops(shape, []) == 0


def test_a_long_causal_sequence_costs_half_of_the_full_square() -> None:
    shape = ModelShape(active_parameters=0, attention_width=64, windows=(None,) * 3)
    assert training_flops(shape, [4096]) == pytest.approx(12 * 3 * 64 * 4096**2 / 2, rel=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2", "phi3", "gemma2"])
def test_agrees_with_the_operations_that_torch_counts(family: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, length = tiny_model(family), 5
    model.set_attn_implementation("eager")
    ids = torch.arange(length)[None] + 6
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    shape = ModelShape.of(model)
    square = 4 * shape.attention_width * len(shape.windows) * (length * length - length * (length + 1) // 2)
    rotary = 2 * 8 * length if family != "gpt2" else 0  # the table of angles, an outer product outside every layer
    counted = counter.get_total_flops()
    assert 0 <= counted - (forward_flops(shape, [length]) + square) <= 4 * rotary  # eager attention fills the square


@pytest.mark.parametrize("is_tied", [True, False])
def test_tied_embeddings_count_once_as_the_head(is_tied: bool) -> None:
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=is_tied, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.device("meta"):
        shape = ModelShape.of(AutoModelForCausalLM.from_config(config))
    attention, mlp = 32 * 32 * 2 + 32 * 16 * 2, 3 * 32 * 48
    assert shape == ModelShape(
        active_parameters=2 * (attention + mlp) + VOCAB * 32, attention_width=32, windows=(None, None)
    )


def test_of_a_mixture_the_experts_in_use_count() -> None:
    shape = ModelShape.of(tiny_model("qwen3_moe"))
    attention, router, experts = 32 * 32 * 2 + 32 * 16 * 2, 4 * 32, 2 * 3 * 32 * 16  # 2 of 4 experts
    assert shape.active_parameters == 2 * (attention + router + experts) + VOCAB * 32


def test_windows_by_layer() -> None:
    assert ModelShape.of(tiny_model("gemma2")).windows == (6, None)
    assert ModelShape.of(tiny_model("mistral")).windows == (6,)
    assert ModelShape.of(tiny_model("qwen2")).windows == (None, None)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA A1000", None),
        ("cpu", None),
    ],
)
def test_peaks_by_device_name(name: str, tera: float | None) -> None:
    peak = peak_flops(name)
    assert peak is None if tera is None else peak == pytest.approx(tera * 1e12)


def test_mfu() -> None:
    assert mfu(989e12, 2.0, "NVIDIA H200") == 0.5
    assert mfu(989e12, 1.0, "NVIDIA H200", num_devices=4) == 0.25
    assert mfu(1e12, 1.0, torch.device("cpu")) is None
    assert mfu(1e12, 0.0, "NVIDIA H200") is None
