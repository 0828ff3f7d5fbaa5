"""What a training step may not depend on: how many ranks share the rows, the weights, the tokens.

Every case runs three updates on one rank and on several, on the same rows, and compares metrics, gradient norms and
weights. Each rank count starts its processes once and runs all of its cases in them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.batches import sampled_batch
from tests.ranks import run_ranks
from tests.tiny import FAMILIES, VOCAB, tiny_model
from verl.algorithms import ALGORITHMS
from verl.algorithms.base import Loss
from verl.batch import Batch
from verl.engines.base import TrainingEngine
from verl.engines.config import OptimConfig, TrainedConfig
from verl.engines.mesh import Mesh, ParallelConfig
from verl.engines.packing import balanced_shards, row_lengths
from verl.models.causal_lm import CausalLM
from verl.models.networks import PolicyNetwork, ValueNetwork

CPU = torch.device("cpu")
PROMPTS, RESPONSES = [3, 5, 1, 7, 2, 4, 6], [4, 1, 6, 2, 9, 3, 0]
STEPS, LR = 3, 1e-3

SP2 = {"sequence_parallel_size": 2}
CASES: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True},
    "gpt2": {"family": "gpt2"},
    "windows and softcap": {"family": "gemma2"},
    "experts": {"family": "qwen3_moe", "max_tokens_per_micro_batch": 8},
    "token-sum": {"aggregation": "token-sum"},
    "one row in a micro-batch": {"max_tokens_per_micro_batch": 8},
    "weights stay gathered": {"reshard_after_forward": False, "max_tokens_per_micro_batch": 8},
    "tied weights stay gathered": {"tied": True, "reshard_after_forward": False, "max_tokens_per_micro_batch": 8},
    "parameters on the CPU": {"offload_parameters": True, "max_tokens_per_micro_batch": 16},
    "moments on the CPU": {"offload_optimizer": True},
    "gradient checkpointing": {"gradient_checkpointing": True, "max_tokens_per_micro_batch": 16},
    "values": {"is_critic": True, "max_tokens_per_micro_batch": 16},
    "all rows on one rank": {"shares": [[0, 1, 2, 3, 4, 5, 6], []], "max_tokens_per_micro_batch": 8},
    "clipped gradient": {"max_grad_norm": 1e-2},
    "sp": {"sizes": SP2},
    "sp, tied": {"sizes": SP2, "tied": True},
    "sp, gpt2": {"sizes": SP2, "family": "gpt2"},
    "sp, windows and softcap": {"sizes": SP2, "family": "gemma2"},
    "sp, long rows": {"sizes": SP2, "max_tokens_per_micro_batch": 4},
    "sp, gradient checkpointing": {"sizes": SP2, "gradient_checkpointing": True},
    "sp, values": {"sizes": SP2, "is_critic": True},
}
OF_FOUR: dict[str, dict[str, Any]] = {
    "dp4": {"max_tokens_per_micro_batch": 16},
    "dp2 x sp2": {"sizes": SP2, "max_tokens_per_micro_batch": 8},
    "dp2 x sp2, tied": {"sizes": SP2, "tied": True, "gradient_checkpointing": True},
    "dp2 x sp2, values": {"sizes": SP2, "is_critic": True},
    "sp4": {"sizes": {"sequence_parallel_size": 4}, "heads": 4},
}


def run_case(
    rank: int,
    mesh: Mesh,
    *,
    family: str = "llama",
    tied: bool = False,
    heads: int = 2,
    shape: dict[str, Any] | None = None,
    is_critic: bool = False,
    aggregation: str = "token-mean",
    shares: list[list[int]] | None = None,
    max_grad_norm: float | None = None,
    **keys: Any,
) -> dict[str, Any]:
    """Metrics of each update, the numbers inferred before and after, and the weights."""
    keys = {"offload_parameters": False, **keys}
    if mesh.device_mesh is None:
        keys["offload_parameters"] = False
    config = TrainedConfig(optim=OptimConfig(lr=LR, max_grad_norm=max_grad_norm), **keys)
    module = tiny_model(family, shape=shape) if shape else tiny(family, tied, heads)
    network = ValueNetwork(module) if is_critic else PolicyNetwork(CausalLM(module), 0.7)
    engine = TrainingEngine(network, config, CPU, "critic" if is_critic else "actor", mesh)
    batch = sampled_batch(PROMPTS, RESPONSES)
    shares = shares or balanced_shards(row_lengths(batch).tolist(), mesh.dp_size)
    own = shares[mesh.dp_rank] if mesh.dp_size > 1 else list(range(len(batch)))
    output = "values" if is_critic else "log_probs"
    metrics, inferred, masks = [], [], []
    for _ in range(STEPS):
        inferred.append(inferred_rows(engine, batch.select(own), output))
        metrics.append(engine.update(batch.select(own), loss(is_critic, aggregation), lr=LR, entropy=True).result())
        if mesh.device_mesh is None:
            masks.append({name: learned(engine, name) for name in engine.masters.masters})
    inferred.append(inferred_rows(engine, batch.select(own), output))
    weights = {name: tensor.clone() for name, tensor in engine.named_full_tensors()}
    found = {"metrics": metrics, "inferred": inferred, "rows": own, "weights": weights}
    if mesh.device_mesh is None:
        found["learned"] = {name: torch.stack([mask[name] for mask in masks]).all(0) for name in weights}
    return found


def learned(engine: TrainingEngine, name: str) -> Tensor:
    """Where a weight has had a gradient beyond rounding: of noise (the bias of GPT-2's keys) Adam makes whole steps."""
    return engine.optimizer.state[engine.masters.masters[name]]["exp_avg_sq"].sqrt() > 1e-6


def tiny(family: str, tied: bool, heads: int) -> PreTrainedModel:
    if not tied and heads == 2:
        return tiny_model(family)
    shape = FAMILIES[family] | {"num_attention_heads": heads}
    config = AutoConfig.for_model(family, vocab_size=VOCAB, tie_word_embeddings=tied, **shape)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.dim() > 1 else 1)
    return model.eval()


def loss(is_critic: bool, aggregation: str) -> Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Loss]:
    kind = ALGORITHMS.load("ppo")
    algorithm = kind(kind.Config(name="ppo", entropy_coef=0.01, loss_aggregation=aggregation))
    if is_critic:
        return lambda out, columns: algorithm.critic_loss(out["values"], columns)
    return lambda out, columns: algorithm.actor_loss(out["log_probs"], out["entropy"], columns)


def inferred_rows(engine: TrainingEngine, batch: Batch, output: str) -> list[Tensor]:
    return list(engine.infer(batch, output).split(batch.lengths("response_ids").tolist()))


def run_all(rank: int, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    results = {}
    warnings.filterwarnings("error", message="FSDP2-wrapped")
    for name, case in cases.items():
        case = dict(case)
        mesh = Mesh.build(ParallelConfig(**case.pop("sizes", {})), "cpu")
        results[name] = run_case(rank, mesh, **case)
    return results


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(2, run_all, CASES, timeout_s=200)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_ranks(4, run_all, OF_FOUR, timeout_s=200)


def assert_equals_one_rank(results: list[dict[str, Any]], name: str, case: dict[str, Any]) -> None:
    one = run_case(0, Mesh.single(), **{k: v for k, v in case.items() if k not in ("sizes", "shares")})
    for result in (r[name] for r in results):
        for got, expected in zip(result["metrics"], one["metrics"], strict=True):
            assert got.keys() == expected.keys()
            for key, value in expected.items():
                if key == "critic/clip_frac":
                    continue  # whether old + (new - old) is new, within the clip range, is a matter of rounding
                assert got[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
        for got_rows, expected_rows in zip(result["inferred"], one["inferred"], strict=True):
            for row, numbers in zip(result["rows"], got_rows, strict=True):
                torch.testing.assert_close(numbers, expected_rows[row], atol=1e-4, rtol=0)
        assert list(result["weights"]) == list(one["weights"])
        for key, tensor in one["weights"].items():
            at = one["learned"][key]
            torch.testing.assert_close(
                result["weights"][key][at], tensor[at], atol=1e-5, rtol=0, msg=partial(_named, key)
            )


def _named(key: str, message: str) -> str:
    return f"{key}: {message}"


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_one(two: list[dict[str, Any]], name: str) -> None:
    assert_equals_one_rank(two, name, CASES[name])


@pytest.mark.parametrize("name", OF_FOUR)
def test_four_ranks_are_one(four: list[dict[str, Any]], name: str) -> None:
    assert_equals_one_rank(four, name, OF_FOUR[name])
