from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tests.batches import sampled_batch
from tests.tiny import tiny_model
from verl.engines.packing import pack
from verl.engines.passes import OneStage
from verl.models.causal_lm import CausalLM
from verl.models.networks import PolicyNetwork

CPU = torch.device("cpu")
MICRO_BATCHES = [pack(sampled_batch([3, 2], [2, 4], seed), CPU) for seed in range(3)]


def test_gradients_of_all_micro_batches_add_up() -> None:
    module = tiny_model("llama")
    network = PolicyNetwork(CausalLM(module))
    order: list[str] = []

    def loss_of(index: int, outputs: Mapping[str, Tensor]) -> Tensor:
        order.append(f"loss {index}")
        return outputs["log_probs"].sum() * (index + 1)

    OneStage(network).learn(MICRO_BATCHES, False, loss_of, lambda index: order.append(f"backward {index}"))
    assert order == [f"{word} {index}" for index in range(3) for word in ("loss", "backward")]
    weight = module.lm_head.weight
    total = sum(network(rows)["log_probs"].sum() * (index + 1) for index, rows in enumerate(MICRO_BATCHES))
    assert isinstance(total, Tensor) and weight.grad is not None
    torch.testing.assert_close(weight.grad, torch.autograd.grad(total, weight)[0], atol=1e-5, rtol=1e-5)


def test_outputs_come_in_order_and_without_a_graph() -> None:
    network = PolicyNetwork(CausalLM(tiny_model("llama")))
    found = list(OneStage(network).infer(MICRO_BATCHES, "log_probs"))
    for rows, values in zip(MICRO_BATCHES, found, strict=True):
        assert not values.requires_grad and values.dtype == torch.float32
        torch.testing.assert_close(values, network(rows)["log_probs"].detach())
