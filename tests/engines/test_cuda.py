"""What only a GPU shows of a training engine."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.batches import sampled_batch
from tests.tiny import tiny_model
from verl.algorithms import ALGORITHMS
from verl.algorithms.base import Loss
from verl.engines.base import LossFunction, TrainingEngine
from verl.engines.config import TrainedConfig
from verl.models.causal_lm import CausalLM
from verl.models.networks import PolicyNetwork

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PROMPTS, RESPONSES = [5, 9, 3, 7, 6, 4], [8, 4, 9, 6, 3, 7]


def grpo_loss() -> LossFunction:
    algorithm = ALGORITHMS.load("grpo")
    loss_of = algorithm(algorithm.Config(name="grpo")).actor_loss

    def loss(outputs, columns) -> Loss:  # type: ignore[no-untyped-def]
        made: Loss = loss_of(outputs["log_probs"], outputs.get("entropy"), columns)
        return made

    return loss


def test_micro_batches_follow_each_other_without_a_wait() -> None:
    device = torch.device("cuda")
    batch = sampled_batch(PROMPTS, RESPONSES)
    waits = []
    for budget in (1000, 16):
        network = PolicyNetwork(CausalLM(tiny_model("llama").to(device, torch.bfloat16)))
        engine = TrainingEngine(network, TrainedConfig(max_tokens_per_micro_batch=budget), device, "actor")
        engine.update(batch, grpo_loss(), lr=1e-3)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                engine.update(batch, grpo_loss(), lr=1e-3)
                updated = len(caught)
                engine.infer(batch, "log_probs")
                waits.append((updated, len(caught) - updated, [str(w.message) for w in caught]))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    (few_update, few_infer, _), (many_update, many_infer, said) = waits
    assert 0 < few_update == many_update and 0 < few_infer == many_infer, said
