"""What a training step may not depend on: how many ranks split a model's matrices or its layers.

Every case runs three updates on one rank and on several, on the same rows, and compares metrics, gradient norms and
weights. Each rank count starts its processes once and runs all of its cases in them.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.invariants.test_ranks import assert_equals_one_rank, run_all
from tests.ranks import run_ranks

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TIED = {**HEADS, "tie_word_embeddings": True}
TP2, PP2, SP2 = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"sequence_parallel_size": 2}
BUDGET = {"max_tokens_per_micro_batch": 20}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"shape": HEADS},
    "llama, tied": {"shape": TIED},
    "qwen2": {"family": "qwen2", "shape": HEADS},
    "qwen3, tied": {"family": "qwen3", "shape": TIED},
    "gemma2, tied": {"family": "gemma2", "shape": TIED},
    "gemma3": {"family": "gemma3_text", "shape": HEADS},
    "phi3": {"family": "phi3", "shape": HEADS},
    "values": {"is_critic": True, "shape": TIED},
    "gradient checkpointing": {"shape": TIED, "gradient_checkpointing": True},
}
OF_TWO: dict[str, dict[str, Any]] = {
    **{f"tp2: {name}": {**case, **BUDGET, "sizes": TP2} for name, case in MODELS.items()},
    **{f"pp2: {name}": {**case, **BUDGET, "sizes": PP2} for name, case in MODELS.items()},
    "tp2: clipped gradient": {**BUDGET, "sizes": TP2, "shape": TIED, "max_grad_norm": 1e-2},
    "pp2: clipped gradient": {**BUDGET, "sizes": PP2, "shape": TIED, "max_grad_norm": 1e-2},
    "pp2: weights stay gathered": {**BUDGET, "sizes": PP2, "shape": TIED, "reshard_after_forward": False},
    "pp2: parameters on the CPU": {**BUDGET, "sizes": PP2, "shape": TIED, "offload_parameters": True},
    "pp2: a row in a micro-batch": {"max_tokens_per_micro_batch": 4, "sizes": PP2},
}
OF_FOUR: dict[str, dict[str, Any]] = {
    **{f"dp2 x tp2: {name}": {**MODELS[name], **BUDGET, "sizes": TP2} for name in ("qwen3, tied", "qwen2", "values")},
    **{f"dp2 x pp2: {name}": {**MODELS[name], **BUDGET, "sizes": PP2} for name in ("llama, tied", "gemma3", "values")},
    "dp2 x pp2: all rows on one rank": {**BUDGET, "sizes": PP2, "shares": [[0, 1, 2, 3, 4, 5, 6], []]},
    "pp2 x tp2": {**BUDGET, "sizes": TP2 | PP2, "shape": TIED, "gradient_checkpointing": True},
    "pp2 x sp2": {**BUDGET, "sizes": PP2 | SP2, "shape": TIED},
    "sp2 x tp2": {**BUDGET, "sizes": TP2 | SP2, "shape": TIED},
}


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(2, run_all, OF_TWO, timeout_s=300)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_ranks(4, run_all, OF_FOUR, timeout_s=300)


@pytest.mark.parametrize("name", OF_TWO)
def test_two_ranks_are_one(two: list[dict[str, Any]], name: str) -> None:
    assert_equals_one_rank(two, name, OF_TWO[name])


@pytest.mark.parametrize("name", OF_FOUR)
def test_four_ranks_are_one(four: list[dict[str, Any]], name: str) -> None:
    assert_equals_one_rank(four, name, OF_FOUR[name])
