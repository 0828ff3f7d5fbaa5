from __future__ import annotations

import copy
from typing import Any

import torch

from tests.batches import sampled_batch
from tests.ranks import run_ranks
from tests.tiny import tiny_model
from verl.common.errors import ConfigError, UnsupportedModel
from verl.engines.mesh import Mesh, ParallelConfig
from verl.engines.packing import pack
from verl.engines.pipeline import Pipeline, Stage, split_layers
from verl.models.causal_lm import CausalLM
from verl.models.networks import Network, PackedRows, PolicyNetwork, ValueNetwork

CPU = torch.device("cpu")
LAYERS = 3
TIED = {"tie_word_embeddings": True}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", TIED),
    ("qwen3", {}),
    ("gemma2", TIED),
    ("gemma3_text", {}),
    ("granite", {}),
    ("phi3", {}),
]


def micro_batches(count: int) -> list[PackedRows]:
    """Of 4 to 14 tokens, no two alike."""
    return [pack(sampled_batch([1 + i, 2], [2 + i, 1], seed=i), CPU) for i in range(count)]


def network_of(family: str, shape: dict[str, Any], is_critic: bool = False) -> Network:
    module = tiny_model(family, shape={"num_hidden_layers": LAYERS, **shape})
    if not is_critic:
        return PolicyNetwork(CausalLM(module))
    network = ValueNetwork(module)
    torch.nn.init.ones_(network.module.value_head.weight)
    return network


def loss_of(index: int, outputs: Any) -> torch.Tensor:
    return sum((1 + index) * values.square().sum() for values in outputs.values())  # type: ignore[return-value]


def pipeline_of(network: Network, mesh: Mesh) -> Pipeline:
    return Pipeline(network, Stage(network, mesh.pp_rank, mesh.pp_size), mesh, CPU, torch.float32)


def differences(network: Network, mesh: Mesh, count: int, output: str = "log_probs") -> dict[str, float]:
    """How far a pipeline's results, gradients and weights are from those of the whole network."""
    whole, rows = copy.deepcopy(network), micro_batches(count)
    pipeline = pipeline_of(network, mesh)
    expected = [whole(each)[output].detach() for each in rows]
    for index, each in enumerate(rows):
        loss_of(index, whole(each, entropy=True)).backward()
    order: list[int] = []
    inferred = pipeline.infer(rows, output)
    pipeline.learn(rows, True, loss_of, order.append)
    assert order == list(range(count))
    mine = dict(network.module.named_parameters())
    theirs = dict(whole.module.named_parameters(remove_duplicate=False))
    of_gradients = [(p.grad - theirs[n].grad).abs().max() / theirs[n].grad.abs().max() for n, p in mine.items()]
    full = dict(pipeline.full_tensors((name, p.detach()) for name, p in mine.items()))
    assert list(full) == [name for name, _ in whole.module.named_parameters()]
    assert all(torch.equal(full[name], theirs[name]) for name in full)
    return {
        "results": max(float((a - b).abs().max()) for a, b in zip(inferred, expected, strict=True)),
        "gradients": float(torch.stack(of_gradients).max()),
        "held": sum(p.numel() for p in mine.values()) / sum(p.numel() for p in full.values()),
        "counted": len(mine.keys() - pipeline.stage.copies),
        "total": len(full),
    }


def test_two_stages_compute_what_one_rank_does() -> None:
    """Scaled embeddings, windows, soft-caps; embedding and head of one weight or two; uneven micro-batches."""

    def body(rank: int) -> list[dict[str, float]]:
        mesh = Mesh.build(ParallelConfig(pipeline_parallel_size=2), "cpu")
        found = [differences(network_of(family, shape), mesh, count=4) for family, shape in CASES]
        return [*found, differences(network_of("llama", TIED, is_critic=True), mesh, 3, "values")]

    stages = run_ranks(2, body)
    for first, last in zip(*stages, strict=True):
        assert max(first["results"], last["results"]) < 1e-5
        assert max(first["gradients"], last["gradients"]) < 5e-5
        assert max(first["held"], last["held"]) < 0.85
        assert first["counted"] + last["counted"] == first["total"]


def test_more_stages_than_micro_batches_and_fewer() -> None:
    def body(rank: int) -> list[dict[str, float]]:
        mesh = Mesh.build(ParallelConfig(pipeline_parallel_size=4), "cpu")
        shape = {"num_hidden_layers": 5, **TIED}
        return [differences(network_of("llama", shape), mesh, count) for count in (1, 2, 6)]

    for found in run_ranks(4, body):
        for each in found:
            assert each["results"] < 1e-5
            assert each["gradients"] < 5e-5


def test_no_more_micro_batches_are_held_than_stages_behind() -> None:
    def body(rank: int) -> int:
        network = network_of("llama", {})
        pipeline = pipeline_of(network, Mesh.build(ParallelConfig(pipeline_parallel_size=3), "cpu"))
        held, most = 0, 0

        def count(step: int) -> None:
            nonlocal held, most
            held += step
            most = max(most, held)

        network.lm.backbone.layers[rank].register_forward_hook(lambda *_: count(1))
        pipeline.learn(micro_batches(7), False, loss_of, lambda _: count(-1))
        return most

    assert run_ranks(3, body) == [3, 2, 1]


def test_what_the_last_stage_knows_reaches_all() -> None:
    def body(rank: int) -> object:
        pipeline = pipeline_of(network_of("llama", {}), Mesh.build(ParallelConfig(pipeline_parallel_size=2), "cpu"))
        return pipeline.from_last({"loss": 0.5} if rank == 1 else None)

    assert run_ranks(2, body) == [{"loss": 0.5}, {"loss": 0.5}]


def test_layers_of_each_stage() -> None:
    network = network_of("llama", {"num_hidden_layers": 7})
    assert split_layers(network, 3) == [range(3), range(3, 5), range(5, 7)]
    assert split_layers(network, 7) == [range(i, i + 1) for i in range(7)]


def refusal(family: str, num_stages: int) -> str:
    try:
        split_layers(network_of(family, {}), num_stages)
    except (ConfigError, UnsupportedModel) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def test_refusals_name_the_key_and_the_model() -> None:
    assert refusal("llama", 4) == (
        "ConfigError: pipeline_parallel_size=4 is more than the model's 3 layers: set pipeline_parallel_size<=3"
    )
    assert refusal("gpt2", 2).startswith("UnsupportedModel: 'gpt2' (GPT2LMHeadModel) can't be cut into stages")
