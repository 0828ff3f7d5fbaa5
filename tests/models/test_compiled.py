"""Layers that are compiled make the updates of those that are not, on one rank and on two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.invariants.test_model_parallel import HEADS
from tests.invariants.test_ranks import run_case
from tests.ranks import run_ranks
from tests.tiny import tiny_model
from verl.common.errors import ConfigError
from verl.engines.mesh import Mesh, ParallelConfig
from verl.models import compiled
from verl.models.causal_lm import CausalLM
from verl.models.compiled import CompiledLayers
from verl.models.networks import decoder_layers

# dynamo hides a warning of its own that a filter "error" would raise
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
ALONE: dict[str, dict[str, Any]] = {
    "llama": {},
    "windows and softcap": {"family": "gemma2"},
    "gpt2": {"family": "gpt2"},
    "values": {"is_critic": True},
    "gradient checkpointing": {"gradient_checkpointing": True, "max_tokens_per_micro_batch": 16},
}
OF_TWO: dict[str, dict[str, Any]] = {
    "dp2, gradient checkpointing": {"gradient_checkpointing": True, "reshard_after_forward": False},
    "tp2": {"sizes": {"tensor_parallel_size": 2}, "shape": HEADS},
    "pp2": {"sizes": {"pipeline_parallel_size": 2}},
    "sp2": {"sizes": {"sequence_parallel_size": 2}},
}


@pytest.fixture(autouse=True)
def quick_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is traced and cut, without the minutes of a compiler."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for got, plain in zip(found["metrics"], expected["metrics"], strict=True):
        assert without_clip_frac(got) == pytest.approx(without_clip_frac(plain), rel=1e-4, abs=1e-5)
    for got, plain in zip(found["inferred"], expected["inferred"], strict=True):
        for row, numbers in zip(found["rows"], got, strict=True):
            torch.testing.assert_close(numbers, plain[row], atol=1e-4, rtol=0)


def without_clip_frac(metrics: dict[str, float]) -> dict[str, float]:
    """Which side of a bound a value is on that lies at it is a matter of rounding."""
    return {key: value for key, value in metrics.items() if key != "critic/clip_frac"}


@pytest.mark.parametrize("name", ALONE)
def test_compiled_updates_are_plain_ones(name: str) -> None:
    torch._dynamo.reset()
    before = num_graphs()
    found = run_case(0, Mesh.single(), compile=True, **ALONE[name])
    assert num_graphs() > before
    assert_same(found, run_case(0, Mesh.single(), **ALONE[name]))


def num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def all_of_two(rank: int) -> dict[str, Any]:
    compiled.BACKEND = "aot_eager"
    found = {}
    for name, case in OF_TWO.items():
        torch._dynamo.reset()
        keys = {key: value for key, value in case.items() if key != "sizes"}
        mesh = Mesh.build(ParallelConfig(**case.get("sizes", {})), "cpu")
        found[name] = run_case(rank, mesh, compile=True, **keys)
    return found


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(2, all_of_two, timeout_s=250)


@pytest.mark.parametrize("name", OF_TWO)
def test_two_ranks_are_one(two: list[dict[str, Any]], name: str) -> None:
    plain = run_case(0, Mesh.single(), shape=OF_TWO[name].get("shape"))
    for found in two:
        assert_same(found[name], plain)


def test_layers_are_compiled_within_the_block_only() -> None:
    backbone: Any = CausalLM(tiny_model("llama")).backbone
    plain = [layer.forward for layer in backbone.layers]
    layers = CompiledLayers(backbone, "actor.compile")
    assert decoder_layers(backbone) == list(backbone.layers)
    with layers.active():
        assert all(layer.forward != before for layer, before in zip(backbone.layers, plain, strict=True))
    assert [layer.forward for layer in backbone.layers] == plain


def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"actor\.compile=true needs a C\+\+ compiler.*g\+\+, clang\+\+"):
        CompiledLayers(nn.Linear(1, 1), "actor.compile")
