from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from tests.batches import sampled_batch
from tests.ranks import run_ranks
from tests.tiny import tiny_model
from verl.algorithms.base import Loss
from verl.common.errors import ConfigError, UnsupportedModel
from verl.engines.base import TrainingEngine
from verl.engines.config import TrainedConfig
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

    def body(rank: int) -> tuple[list[dict[str, float]], object]:
        mesh = Mesh.build(ParallelConfig(pipeline_parallel_size=2), "cpu")
        found = [differences(network_of(family, shape), mesh, count=4) for family, shape in CASES]
        found.append(differences(network_of("llama", TIED, is_critic=True), mesh, 3, "values"))
        return found, pipeline_of(network_of("llama", {}), mesh).from_last({"loss": 0.5} if rank == 1 else None)

    (first_stage, told), (last_stage, _) = run_ranks(2, body)
    assert told == {"loss": 0.5}
    for first, last in zip(first_stage, last_stage, strict=True):
        assert max(first["results"], last["results"]) < 1e-5
        assert max(first["gradients"], last["gradients"]) < 5e-5
        assert max(first["held"], last["held"]) < 0.85
        assert first["counted"] + last["counted"] == first["total"]


def most_held(rank: int, mesh: Mesh, count: int) -> int:
    """How many micro-batches went forward on this stage and not yet back, at most."""
    network = network_of("llama", {"num_hidden_layers": mesh.pp_size})
    pipeline, held, most = pipeline_of(network, mesh), 0, 0

    def note(step: int) -> None:
        nonlocal held, most
        held += step
        most = max(most, held)

    network.lm.backbone.layers[rank].register_forward_hook(lambda *_: note(1))
    pipeline.learn(micro_batches(count), False, loss_of, lambda _: note(-1))
    return most


def test_more_stages_than_micro_batches_and_fewer() -> None:
    """Whatever their number, a stage holds no more of them at once than there are stages from it on."""

    def body(rank: int) -> tuple[list[dict[str, float]], list[int]]:
        mesh = Mesh.build(ParallelConfig(pipeline_parallel_size=4), "cpu")
        shape = {"num_hidden_layers": 5, **TIED}
        found = [differences(network_of("llama", shape), mesh, count) for count in (1, 2, 6)]
        return found, [most_held(rank, mesh, count) for count in (2, 7)]

    stages = run_ranks(4, body)
    for found, _ in stages:
        for each in found:
            assert each["results"] < 1e-5
            assert each["gradients"] < 5e-5
    assert [held for _, held in stages] == [[2, 4], [2, 3], [2, 2], [1, 1]]


def test_every_stage_skips_the_same_update() -> None:
    """The first stage alone meets a gradient that isn't finite, below everything that the last one computes."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan")

    def loss(outputs: Mapping[str, torch.Tensor], columns: Mapping[str, torch.Tensor]) -> Loss:
        return Loss(outputs["log_probs"].sum(), columns["response_mask"].sum())

    def body(rank: int) -> list[tuple[float, bool]]:
        mesh, found = Mesh.build(ParallelConfig(pipeline_parallel_size=2), "cpu"), []
        for is_spoiled in (True, False):
            engine = TrainingEngine(network_of("llama", {}), TrainedConfig(), CPU, "actor", mesh)
            if is_spoiled and rank == 0:
                embedding = engine.network.lm.backbone.embed_tokens
                embedding.register_forward_hook(lambda _, __, output: output.register_hook(spoil) and None)
            before = {name: m.to_local().clone() for name, m in engine.masters.masters.items()}
            metrics = engine.update(sampled_batch([3, 5], [4, 2]), loss, lr=1e-3).result()
            is_same = all(torch.equal(m.to_local(), before[name]) for name, m in engine.masters.masters.items())
            found.append((metrics["actor/skipped_updates/sum"], is_same))
        return found

    assert run_ranks(2, body) == [[(1, True), (0, False)]] * 2


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
