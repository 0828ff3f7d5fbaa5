"""Two GPUs make the updates of one, in bfloat16, and hand whole weights to a rollout that has captured its graphs."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.batches import sampled_batch
from tests.ranks import run_ranks
from verl.algorithms import ALGORITHMS
from verl.algorithms.base import Loss
from verl.batch import Batch
from verl.engines.base import TrainingEngine
from verl.engines.config import TrainedConfig
from verl.engines.mesh import Mesh, ParallelConfig
from verl.models.causal_lm import CausalLM
from verl.models.networks import PolicyNetwork
from verl.rollout import ROLLOUT_ENGINES
from verl.rollout.base import Request

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]
SHAPE = {
    "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"sizes": {"tensor_parallel_size": 2}},
    "pp2": {"sizes": {"pipeline_parallel_size": 2}},
    "sp2": {"sizes": {"sequence_parallel_size": 2}},
    "weights stay gathered": {"reshard_after_forward": False},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "moments on the CPU": {"offload_optimizer": True},
    "parameters on the CPU": {"offload_parameters": True},
}
ROWS = 16


def device() -> torch.device:
    return torch.device(f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu")


def network(dtype: torch.dtype = torch.bfloat16) -> PolicyNetwork:
    """The same weights in either type."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", initializer_range=0.05, bos_token_id=0, eos_token_id=1, **SHAPE)
    with device():
        return PolicyNetwork(CausalLM(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(dtype)))


def engine(mesh: Mesh, dtype: torch.dtype = torch.bfloat16, **keys: Any) -> TrainingEngine:
    config = TrainedConfig(max_tokens_per_micro_batch=1024, **keys)
    return TrainingEngine(network(dtype), config, device(), "actor", mesh)


def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    prompts, responses = (torch.randint(8, high, (ROWS,), generator=generator).tolist() for high in (64, 200))
    return sampled_batch(prompts, responses)


def loss(outputs: Any, columns: Any) -> Loss:
    algorithm = ALGORITHMS.load("grpo")
    made: Loss = algorithm(algorithm.Config(name="grpo")).actor_loss(
        outputs["log_probs"], outputs.get("entropy"), columns
    )
    return made


def three_updates(mesh: Mesh, **keys: Any) -> dict[str, Any]:
    one, rows = engine(mesh, **keys), list(range(mesh.dp_rank, ROWS, mesh.dp_size))
    share = batch().select(rows)
    steps = [one.update(share, loss, lr=1e-3).result() for _ in range(3)]
    log_probs = one.infer(share, "log_probs").split(share.lengths("response_ids").tolist())
    weights = {name: tensor.float().cpu() for name, tensor in one.named_full_tensors()}
    return {"steps": steps, "rows": rows, "log_probs": [row.cpu() for row in log_probs], "weights": weights}


def all_cases(rank: int) -> dict[str, Any]:
    return {
        name: three_updates(Mesh.build(ParallelConfig(**case.get("sizes", {})), device().type), **without_sizes(case))
        for name, case in CASES.items()
    }


def without_sizes(case: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in case.items() if key != "sizes"}


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    return run_ranks(2, all_cases, backend="nccl", timeout_s=280)


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return three_updates(Mesh.single())


@pytest.fixture(scope="module")
def exact() -> dict[str, Any]:
    return three_updates(Mesh.single(), dtype=torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_two_gpus_make_the_updates_of_one(
    two: list[dict[str, Any]], one: dict[str, Any], exact: dict[str, Any], name: str
) -> None:
    rounding = distance(one, exact)
    for found in (result[name] for result in two):
        for got, expected in zip(found["steps"], one["steps"], strict=True):
            assert got["actor/policy_loss"] == pytest.approx(expected["actor/policy_loss"], abs=2e-2)
            assert got["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=3e-2)
        for kind, gap in distance(found, exact).items():
            assert gap < 1.5 * rounding[kind], (kind, gap, rounding[kind])


def distance(found: dict[str, Any], exact: dict[str, Any]) -> dict[str, float]:
    """From what float32 gives, after three updates: mean over the rows of ``found``, and over all weights."""
    log_probs = dict(zip(exact["rows"], exact["log_probs"], strict=True))
    rows = [(log_probs[row] - p).abs().mean() for row, p in zip(found["rows"], found["log_probs"], strict=True)]
    assert found["weights"].keys() == exact["weights"].keys()
    weights = [(found["weights"][k] - w).abs().flatten() for k, w in exact["weights"].items()]
    return {"log_probs": float(torch.stack(rows).mean()), "weights": float(torch.cat(weights).mean())}


def fresh_weights(rank: int) -> dict[str, Any]:
    """Greedy responses before and after updates on two GPUs, and those of an engine that never had other weights."""
    kind = ROLLOUT_ENGINES.load("native")
    config = kind.Config(name="native", max_response_tokens=32, ignore_eos=True)
    sampling = config.sampling(temperature=0.0)
    asks = [Request(prompt_ids=list(range(5 + i, 20 + i)), seed=i, sampling=sampling) for i in range(8)]

    def respond(rollout: Any) -> list[list[int]]:
        return [list(response.response_ids) for response in rollout.generate(asks)]

    trained = engine(Mesh.build(ParallelConfig(), device().type))
    rollout = kind(network().lm, None, config, frozenset([1]))
    before = respond(rollout)
    for _ in range(3):
        trained.update(batch().select(list(range(rank, ROWS, 2))), loss, lr=1e-2)
    rollout.sleep()
    rollout.load_weights(trained.named_full_tensors(), 1)
    after = respond(rollout)
    other = kind(network().lm, None, config, frozenset([1]))
    other.load_weights(trained.named_full_tensors(), 1)
    return {"before": before, "after": after, "other": respond(other)}


def test_whole_weights_reach_a_rollout_with_graphs() -> None:
    for found in run_ranks(2, fresh_weights, backend="nccl", timeout_s=200):
        assert found["before"] != found["after"]
        pairs = [(a, b) for x, y in zip(found["after"], found["other"], strict=True) for a, b in zip(x, y, strict=True)]
        assert sum(a == b for a, b in pairs) / len(pairs) > 0.9
