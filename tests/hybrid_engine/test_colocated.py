from __future__ import annotations

import pytest
import torch

from tests.batches import sampled_batch
from tests.rollout.engines import build, greedy, ids_of, prompt, request
from tests.tiny import tiny_model
from verl.algorithms import ALGORITHMS
from verl.common.errors import LayoutError, StaleWeights
from verl.engines.base import TrainingEngine
from verl.engines.config import TrainedConfig
from verl.hybrid_engine.colocated import SharedWeights
from verl.models.causal_lm import CausalLM
from verl.models.networks import PolicyNetwork

CPU = torch.device("cpu")


class Pair:
    """An actor and the rollout engine that shares its weights."""

    def __init__(self, family: str = "llama", dtype: torch.dtype = torch.float32) -> None:
        self.module = tiny_model(family).to(dtype)
        self.engine = TrainingEngine(PolicyNetwork(CausalLM(self.module)), TrainedConfig(), CPU, "actor")
        self.rollout = build(module=self.module)
        self.weights = SharedWeights(self.engine, self.rollout, self.module)

    def update(self, lr: float = 0.05) -> None:
        kind = ALGORITHMS.load("grpo")
        algorithm = kind(kind.Config(name="grpo"))
        batch = sampled_batch([3, 4], [5, 6])
        self.engine.update(batch, lambda out, columns: algorithm.actor_loss(out["log_probs"], None, columns), lr=lr)

    def answer(self) -> list[list[int]]:
        return ids_of(self.rollout.generate([request(prompt(5)), request(prompt(9, first=11))]))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_the_engine_samples_from_the_weights_that_were_just_learnt(family: str) -> None:
    pair = Pair(family)
    before = pair.answer()
    pair.update()
    pair.weights.sync()
    fresh = tiny_model(family)
    fresh.load_state_dict(pair.module.state_dict())
    assert pair.answer() == [greedy(fresh, prompt(5), 8), greedy(fresh, prompt(9, first=11), 8)]
    assert pair.answer() != before


def test_versions_count_syncs_and_mark_responses() -> None:
    pair = Pair()
    assert pair.weights.version == 0
    for version in (1, 2):
        pair.update()
        pair.weights.sync()
        assert pair.weights.version == version
        assert pair.rollout.generate([request(prompt(3))])[0].policy_version == version
    pair.weights.set_version(9)
    assert pair.weights.version == 9


def test_an_update_that_was_not_synced_is_refused_by_both_sides() -> None:
    pair = Pair()
    pair.weights.check()
    pair.update()
    with pytest.raises(StaleWeights, match="after version 0"):
        pair.weights.check()
    with pytest.raises(StaleWeights):
        pair.answer()
    pair.weights.sync()
    pair.weights.check()
    pair.answer()


def test_an_update_of_nothing_needs_no_sync() -> None:
    pair = Pair()
    batch = sampled_batch([3], [2])
    batch.put("response_mask", torch.zeros(2, dtype=torch.bool))
    kind = ALGORITHMS.load("grpo")
    algorithm = kind(kind.Config(name="grpo"))
    pair.engine.update(batch, lambda out, columns: algorithm.actor_loss(out["log_probs"], None, columns), lr=1.0)
    pair.weights.check()


def test_weights_of_a_copy_are_refused() -> None:
    pair = Pair()
    with pytest.raises(LayoutError, match=r"'model\.embed_tokens\.weight' doesn't share the actor's storage"):
        SharedWeights(pair.engine, build(), tiny_model("llama"))


def test_one_tensor_of_another_storage_is_named() -> None:
    pair = Pair()
    other = tiny_model("llama")
    for (_, theirs), ours in zip(other.named_parameters(), pair.module.parameters(), strict=True):
        theirs.data = ours.data
    SharedWeights(pair.engine, pair.rollout, other)
    other.model.norm.weight.data = other.model.norm.weight.data.clone()
    with pytest.raises(LayoutError, match=r"'model\.norm\.weight'"):
        SharedWeights(pair.engine, pair.rollout, other)


def test_bfloat16_weights_are_rounded_from_their_masters_in_place() -> None:
    """The rollout reads the tensors that the optimizer's float32 masters are published to."""
    pair = Pair(dtype=torch.bfloat16)
    pointers = [p.data_ptr() for p in pair.module.parameters()]
    before = [p.clone() for p in pair.module.parameters()]
    pair.update()
    pair.weights.sync()
    assert [p.data_ptr() for p in pair.module.parameters()] == pointers
    assert any(not torch.equal(a, b) for a, b in zip(before, pair.module.parameters(), strict=True))
    pair.answer()
