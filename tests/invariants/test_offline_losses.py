"""Updates on given answers (SFT, reward model, DPO, KTO) don't depend on micro-batches, ranks or how a rank's part of a
model is made.

Each case makes three updates on the same rows in one piece on one rank, and cut otherwise; loss, gradient norm and what
the model says of the rows afterwards are compared. Pairs lie apart in the batch and are of unequal lengths.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.batches import sampled_batch
from tests.ranks import run_ranks
from tests.tiny import tiny_model
from verl.algorithms.bradley_terry import BradleyTerry, BradleyTerryConfig
from verl.algorithms.dpo import DPO, DPOConfig
from verl.algorithms.kto import KTO, KTOConfig
from verl.algorithms.sft import SFT, SFTConfig
from verl.batch import Batch
from verl.engines.base import TrainingEngine
from verl.engines.config import OptimConfig, TrainedConfig
from verl.engines.mesh import Mesh, ParallelConfig
from verl.engines.packing import balanced_shards, kept_together, rows_of, unit_lengths
from verl.models.causal_lm import CausalLM
from verl.models.networks import PolicyNetwork, ScoreNetwork

CPU = torch.device("cpu")
PROMPTS, RESPONSES = [3, 5, 1, 7, 2, 4, 6, 2], [4, 1, 6, 2, 9, 3, 0, 1]
PAIRS, IS_CHOSEN = [4, 9, 6, 4, 9, 6, 2, 2], [1, 0, 0, 0, 1, 1, 1, 0]
LOSSES: dict[str, Any] = {
    "sft": SFT(SFTConfig()),
    "bradley_terry": BradleyTerry(BradleyTerryConfig(centre_coef=0.01)),
    "dpo": DPO(DPOConfig()),
    "ipo": DPO(DPOConfig(loss="ipo")),
    "kto": KTO(KTOConfig(undesirable_weight=0.5)),
}
KINDS = tuple(LOSSES)
BUDGETS = (4096, 24, 8)
CUTS: dict[str, dict[str, int]] = {
    "dp2": {},
    "sp2": {"sequence_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "tp2": {"tensor_parallel_size": 2},
}


def rows() -> Batch:
    """Four pairs, one of them with an empty response; the mask leaves out a token within a row."""
    batch = sampled_batch(PROMPTS, RESPONSES)
    batch.put("pair_id", torch.tensor(PAIRS))
    batch.put("is_chosen", torch.tensor(IS_CHOSEN, dtype=torch.bool))
    mask = batch["response_mask"].clone()
    mask[1] = False
    batch.put("response_mask", mask)
    generator = torch.Generator().manual_seed(3)
    batch.put("ref_log_probs", -3 * torch.rand(sum(RESPONSES), generator=generator))
    batch.put("kl_estimate", torch.full((len(PROMPTS),), 0.3))
    return batch


def updates(kind: str, budget: int, mesh: Mesh) -> dict[str, Any]:
    """Metrics of three updates, and what the model then says of this rank's rows, by their numbers."""
    config = TrainedConfig(optim=OptimConfig(lr=1e-3), max_tokens_per_micro_batch=budget)
    module = tiny_model("llama", shape={"num_key_value_heads": 2})
    is_scored = kind == "bradley_terry"
    network: Any = ScoreNetwork(CausalLM(module)) if is_scored else PolicyNetwork(CausalLM(module))
    engine = TrainingEngine(network, config, CPU, kind, mesh)
    batch = rows()
    units = kept_together(batch)
    own = rows_of(units, balanced_shards(unit_lengths(batch, units), mesh.dp_size))[mesh.dp_rank]
    part = batch.select(own)

    def loss(outputs: Any, columns: Any) -> Any:
        if is_scored:
            return LOSSES[kind].score_loss(outputs["scores"], columns)
        return LOSSES[kind].actor_loss(outputs["log_probs"], None, columns)

    metrics = [engine.update(part, loss, lr=1e-3).result() for _ in range(3)]
    said = engine.infer(part, "scores" if is_scored else "log_probs").split(part.lengths("response_ids").tolist())
    return {"metrics": metrics, "said": dict(zip(own, said, strict=True))}


@pytest.fixture(scope="module")
def whole() -> dict[str, dict[str, Any]]:
    """Each kind in one piece on one rank."""
    return {kind: updates(kind, BUDGETS[0], Mesh.single()) for kind in KINDS}


def on_two_ranks(rank: int) -> dict[tuple[str, str], dict[str, Any]]:
    meshes = {name: Mesh.build(ParallelConfig(**sizes), "cpu") for name, sizes in CUTS.items()}
    return {(kind, name): updates(kind, BUDGETS[1], mesh) for kind in KINDS for name, mesh in meshes.items()}


@pytest.fixture(scope="module")
def two() -> list[dict[tuple[str, str], dict[str, Any]]]:
    return run_ranks(2, on_two_ranks, timeout_s=200)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for got, wanted in zip(found["metrics"], expected["metrics"], strict=True):
        assert got == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    for row, numbers in found["said"].items():
        near: Tensor = expected["said"][row]
        torch.testing.assert_close(numbers, near, atol=1e-4, rtol=0)


@pytest.mark.parametrize("budget", BUDGETS[1:])
@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_change_nothing(kind: str, budget: int, whole: dict[str, dict[str, Any]]) -> None:
    assert_same(updates(kind, budget, Mesh.single()), whole[kind])


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_are_one(
    kind: str, name: str, whole: dict[str, dict[str, Any]], two: list[dict[tuple[str, str], dict[str, Any]]]
) -> None:
    for result in two:
        assert_same(result[kind, name], whole[kind])
    assert {row for result in two for row in result[kind, name]["said"]} == set(range(len(PROMPTS)))


def test_something_is_learned_so_that_it_could_differ(whole: dict[str, dict[str, Any]]) -> None:
    for kind in KINDS:
        key = "reward_model/loss" if kind == "bradley_terry" else "actor/loss"
        losses = [metrics[key] for metrics in whole[kind]["metrics"]]
        assert losses[2] < losses[1] < losses[0]
