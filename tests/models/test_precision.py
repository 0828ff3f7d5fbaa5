"""Weights in another type, with rotary frequencies as they were."""

from __future__ import annotations

import torch

from tests.tiny import tiny_model
from verl.models.precision import cast_parameters


def test_parameters_change_their_type_and_buffers_do_not() -> None:
    module = tiny_model("llama", shape={"tie_word_embeddings": True})
    angles = module.model.rotary_emb.inv_freq.clone()
    cast_parameters(module, torch.bfloat16)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert torch.equal(module.model.rotary_emb.inv_freq, angles) and angles.dtype == torch.float32
    assert module.lm_head.weight is module.model.embed_tokens.weight


def test_each_parameter_to_a_type_of_its_own() -> None:
    module = torch.nn.Linear(2, 2)
    cast_parameters(module, {"weight": torch.bfloat16, "bias": torch.float32})
    assert (module.weight.dtype, module.bias.dtype) == (torch.bfloat16, torch.float32)
