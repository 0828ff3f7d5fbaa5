from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.batches import sampled_batch
from tests.ranks import run_ranks
from tests.tiny import tiny_model
from verl.algorithms.base import Loss
from verl.common.errors import ConfigError, UnsupportedModel
from verl.engines.base import TrainingEngine
from verl.engines.config import TrainedConfig
from verl.engines.mesh import Mesh, ParallelConfig
from verl.engines.tensor import apply_tensor_parallel
from verl.models.attention import PackedAttention
from verl.models.causal_lm import CausalLM
from verl.models.networks import PolicyNetwork
from verl.models.token_log_probs import log_probs_and_entropy

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**HEADS, "attention_bias": True, "mlp_bias": True},
    **dict.fromkeys(("qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "granite"), HEADS),
}


def differences(lm: CausalLM, whole: CausalLM) -> tuple[float, float]:
    """Largest difference of log-probs, and of a parameter's gradient relative to its largest element."""
    ids, positions = torch.arange(3, 15), torch.tensor([0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4])
    found = []
    for each in (lm, whole):
        hidden = each.hidden(ids, positions, PackedAttention(torch.tensor([7, 5]), torch.device("cpu")))
        log_probs, entropy = log_probs_and_entropy(each, hidden[:-1], ids[1:], 0.7, True)
        (log_probs.sum() + entropy.sum() / 3).backward()
        found.append(log_probs.detach())
    of_gradients = 0.0
    for one, other in zip(lm.module.parameters(), whole.module.parameters(), strict=True):
        gradient = one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
        of_gradients = max(of_gradients, float((gradient - other.grad).abs().max() / other.grad.abs().max()))
    return float((found[0] - found[1]).abs().max()), of_gradients


def test_two_ranks_compute_what_one_does() -> None:
    """Biases of both kinds, norms over heads, soft-caps, packed projections, scaled residuals; every rank agrees."""

    def body(rank: int) -> dict[str, tuple[float, float, float]]:
        mesh = Mesh.build(ParallelConfig(tensor_parallel_size=2), "cpu")
        found = {}
        for family, shape in FAMILIES.items():
            module = tiny_model(family, shape=shape)
            lm, whole = CausalLM(module), CausalLM(copy.deepcopy(module))
            apply_tensor_parallel(lm, mesh)
            local = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in module.parameters())
            found[family] = (*differences(lm, whole), local / sum(p.numel() for p in whole.module.parameters()))
        return found

    for found in run_ranks(2, body):
        for family, (log_probs, gradients, held) in found.items():
            assert log_probs < 1e-5, family
            assert gradients < 3e-5, family
            assert held < 0.75, family


def test_masters_are_float32_under_a_bfloat16_module() -> None:
    """A step far below bfloat16's resolution is kept; what is handed on is bfloat16 and the same on every rank."""

    def body(rank: int) -> tuple[set[torch.dtype], float, dict[str, torch.Tensor]]:
        module = tiny_model("qwen3", shape=HEADS).bfloat16()
        mesh = Mesh.build(ParallelConfig(tensor_parallel_size=2), "cpu")
        engine = TrainingEngine(PolicyNetwork(CausalLM(module)), TrainedConfig(), torch.device("cpu"), "actor", mesh)
        before = {name: m.to_local().clone() for name, m in engine.masters.masters.items()}
        engine.update(sampled_batch([3, 5], [4, 2]), loss, lr=1e-5)
        moved = [(m.to_local() - before[name]).abs().max() for name, m in engine.masters.masters.items()]
        full = {name: tensor.clone() for name, tensor in engine.named_full_tensors()}
        return {tensor.dtype for tensor in before.values()}, float(torch.stack(moved).max()), full

    def loss(outputs: Mapping[str, torch.Tensor], columns: Mapping[str, torch.Tensor]) -> Loss:
        return Loss(outputs["log_probs"].sum(), columns["response_mask"].sum())

    found = run_ranks(2, body)
    for dtypes, moved, full in found:
        assert dtypes == {torch.float32}
        assert 0.9e-5 < moved < 1.1e-5
        for name, tensor in full.items():
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(tensor, found[0][2][name])


def refusal(work: Callable[[Mesh], object]) -> str:
    try:
        work(Mesh.build(ParallelConfig(tensor_parallel_size=2), "cpu"))
    except (ConfigError, UnsupportedModel) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def test_refusals_name_the_key_and_the_model() -> None:
    def body(rank: int) -> list[str]:
        models = [("llama", {}), ("llama", {**HEADS, "intermediate_size": 47}), ("gpt2", {}), ("qwen3_moe", HEADS)]
        return [
            refusal(lambda mesh, f=family, s=shape: apply_tensor_parallel(CausalLM(tiny_model(f, shape=s)), mesh))
            for family, shape in models
        ]

    for heads, width, planless, unknown in run_ranks(2, body):
        assert (
            heads.startswith("ConfigError") and "num_key_value_heads=1" in heads and "tensor_parallel_size=2" in heads
        )
        assert "47" in width and "mlp.gate_proj" in width
        assert planless.startswith("UnsupportedModel: 'gpt2'") and "tensor_parallel_size=1" in planless
        assert unknown.startswith("UnsupportedModel: 'qwen3_moe'") and "packed_colwise" in unknown


def test_one_rank_is_left_alone() -> None:
    lm = CausalLM(tiny_model("gpt2"))
    apply_tensor_parallel(lm, Mesh.single())
    assert not any(isinstance(p, DTensor) for p in lm.module.parameters())
