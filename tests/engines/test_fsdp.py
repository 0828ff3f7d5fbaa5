"""Two gloo ranks run every check once; the tests look at what they saw."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.batches import sampled_batch
from tests.ranks import run_ranks
from tests.tiny import tiny_model
from verl.algorithms.base import Loss
from verl.batch import Batch
from verl.engines.base import Engine, TrainingEngine
from verl.engines.config import EngineConfig, OptimConfig, TrainedConfig
from verl.engines.mesh import Mesh, ParallelConfig
from verl.engines.saved_optimizer import load_optimizer, save_optimizer
from verl.models.causal_lm import CausalLM
from verl.models.networks import PolicyNetwork
from verl.observe.communication import CommunicationRecorder

CPU = torch.device("cpu")
PARAMETERS = sum(p.numel() for p in tiny_model("llama").parameters())


def log_prob_loss(outputs: Any, columns: Any) -> Loss:
    mask = columns["response_mask"]
    per_token = torch.where(mask, -outputs["log_probs"] * columns["advantages"], 0.0)
    return Loss(per_token.sum(), mask.sum().float(), {"actor/x": (per_token.sum().detach(), mask.sum())})


def build(
    dtype: torch.dtype = torch.float32, mesh: Mesh | None = None, lr: float = 1e-3, **keys: Any
) -> TrainingEngine:
    mesh = mesh or Mesh.build(ParallelConfig(), "cpu")
    config = TrainedConfig(optim=OptimConfig(lr=lr), **keys)
    network = PolicyNetwork(CausalLM(tiny_model("llama").to(dtype)))
    return TrainingEngine(network, config, CPU, "actor", mesh)


def rows_of(rank: int) -> Batch:
    """Three rows of two ranks: the second has one."""
    return sampled_batch([3, 5, 2], [4, 2, 6]).select([[0, 2], [1]][rank])


def weights(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_full_tensors()}


def see_shares(rank: int, folder: Path) -> Any:
    engine = build()
    engine.update(rows_of(rank), log_prob_loss, lr=1e-3)
    local = sum(m.to_local().numel() for m in engine.masters.masters.values())  # type: ignore[attr-defined]
    moments = sum(s["exp_avg"].numel() for s in engine.optimizer.state.values())
    return local, moments


def see_bfloat16(rank: int, folder: Path) -> Any:
    """Steps far below bfloat16's resolution: lost in the weights that are handed out, kept in the slices."""
    engine = build(torch.bfloat16, lr=1e-6)
    before = [m.to_local().clone() for m in engine.masters.masters.values()]  # type: ignore[attr-defined]
    for _ in range(2):
        engine.update(rows_of(rank), log_prob_loss, lr=1e-6)
    after = [m.to_local() for m in engine.masters.masters.values()]  # type: ignore[attr-defined]
    moved = max(float((a - b).abs().max()) for a, b in zip(after, before, strict=True) if len(a))
    return moved, {m.dtype for m in after}, weights(engine)


def see_reference(rank: int, folder: Path) -> Any:
    """A module that only infers keeps its type, and its slice of the weights."""
    network = PolicyNetwork(CausalLM(tiny_model("llama").bfloat16()))
    engine = Engine(network, EngineConfig(), CPU, "reference", Mesh.build(ParallelConfig(), "cpu"))
    log_probs = engine.infer(rows_of(rank), "log_probs")
    held = [p for _, p in engine.network.module.named_parameters()]
    return log_probs, sum(p.to_local().numel() for p in held), {p.dtype for p in held}  # type: ignore[attr-defined]


def see_bad_gradient(rank: int, folder: Path) -> Any:
    """Only the second rank's loss is NaN."""
    engine = build()
    before = weights(engine)

    def loss(outputs: Any, columns: Any) -> Loss:
        return Loss(outputs["log_probs"].sum() * (float("nan") if rank == 1 else 1.0), torch.ones(()))

    metrics = engine.update(rows_of(rank), loss, lr=1.0).result()
    after = weights(engine)
    return metrics["actor/skipped_updates/sum"], engine.has_unsynced_update, [before, after]


def see_no_tokens(rank: int, folder: Path) -> Any:
    """Rows without a response on one rank, no rows on the other."""
    engine = build()
    before = weights(engine)
    batch = sampled_batch([3, 2], [0, 0])
    metrics = engine.update(batch if rank == 0 else Batch([]), log_prob_loss, lr=1.0).result()
    return metrics["actor/grad_norm"], [before, weights(engine)], len(engine.infer(Batch([]), "log_probs"))


def see_unequal_ranks(rank: int, folder: Path) -> Any:
    """H24: lengths 7 7 7 7 on one rank, 2 2 2 2 on the other, 8 tokens a micro-batch."""
    engine = build(max_tokens_per_micro_batch=8)
    passes: list[int] = []
    engine.network.lm.backbone.register_forward_pre_hook(lambda *_: passes.append(1))
    batch = sampled_batch([4, 4, 4, 4, 1, 1, 1, 1], [3, 3, 3, 3, 1, 1, 1, 1])
    result = engine.update(batch.select(range(4 * rank, 4 * rank + 4)), log_prob_loss, lr=1e-3).result()
    return len(passes), result


def see_collectives(rank: int, folder: Path) -> Any:
    """Collectives of an update of two micro-batches; a unit for each of two layers, one for the rest."""
    counts = []
    for reshard in (True, False):
        engine = build(max_tokens_per_micro_batch=8, reshard_after_forward=reshard)
        engine.infer(rows_of(0), "log_probs")
        recorder = CommunicationRecorder()
        recorder.start()
        engine.update(rows_of(0), log_prob_loss, lr=1e-3)
        recorder.stop()
        counts.append(Counter(event.op for event in recorder.events({"traceEvents": []})))
    return counts


def see_whole_weights(rank: int, folder: Path) -> Any:
    """Whole weights by name and the collectives of handing them out: before a first pass, then after an update."""
    engine = build()
    seen = []
    for _ in range(2):
        recorder = CommunicationRecorder()
        recorder.start()
        kept = dict(engine.named_full_tensors())
        recorder.stop()
        seen.append((kept, Counter(event.op for event in recorder.events({"traceEvents": []}))))
        broken_off = engine.named_full_tensors()
        next(broken_off)
        engine.update(rows_of(rank), log_prob_loss, lr=1e-3)
    expected = {n: p.full_tensor() for n, p in engine.network.module.named_parameters()}  # type: ignore[attr-defined]
    return seen, expected, dict(engine.named_full_tensors())


def see_resumed(rank: int, folder: Path) -> Any:
    """Two steps, a checkpoint of the optimizer and the weights, one more step: with and without the break."""
    engine = build()
    for _ in range(2):
        engine.update(rows_of(rank), log_prob_loss, lr=1e-3)
    masters = engine.masters
    save_optimizer(folder / "optimizer", engine.optimizer, masters.separate, parameters=masters.masters)
    saved = weights(engine)
    engine.update(rows_of(rank), log_prob_loss, lr=1e-3)
    other = build()
    with torch.no_grad():
        for name, parameter in other.network.module.named_parameters():
            assert isinstance(parameter, DTensor)
            rows = parameter.to_local().shape[0]
            start = -(-saved[name].shape[0] // 2) * rank
            parameter.to_local().copy_(saved[name][start : start + rows])
    masters = other.masters
    load_optimizer(folder / "optimizer", other.optimizer, masters.separate, parameters=masters.masters)
    other.update(rows_of(rank), log_prob_loss, lr=1e-3)
    return [weights(engine), weights(other)]


def see_frozen(rank: int, folder: Path) -> Any:
    module = tiny_model("llama")
    module.model.embed_tokens.requires_grad_(False)
    network = PolicyNetwork(CausalLM(module))
    engine = TrainingEngine(network, TrainedConfig(), CPU, "actor", Mesh.build(ParallelConfig(), "cpu"))
    before = weights(engine)
    engine.update(rows_of(rank), log_prob_loss, lr=1e-2)
    after = weights(engine)
    return sorted(name for name in after if torch.equal(before[name], after[name]))


CHECKS = (
    see_shares, see_bfloat16, see_reference, see_bad_gradient, see_no_tokens, see_unequal_ranks, see_collectives,
    see_whole_weights, see_resumed, see_frozen,
)  # fmt: skip


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    results = run_ranks(2, lambda rank: [check(rank, folder) for check in CHECKS])
    return {check.__name__: [result[i] for result in results] for i, check in enumerate(CHECKS)}


def assert_unchanged(pair: list[dict[str, Tensor]]) -> None:
    before, after = pair
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_each_rank_keeps_half_of_the_weights_and_of_the_moments(seen: dict[str, list[Any]]) -> None:
    (weights_0, moments_0), (weights_1, moments_1) = seen["see_shares"]
    assert weights_0 + weights_1 == moments_0 + moments_1 == PARAMETERS
    assert abs(weights_0 - weights_1) < 0.01 * PARAMETERS


def test_low_precision_learns_through_float32_slices(seen: dict[str, list[Any]]) -> None:
    one = build(torch.bfloat16, Mesh.single(), lr=1e-6)
    original = dict(copy.deepcopy(one.network.module).named_parameters())
    for moved, dtypes, handed_out in seen["see_bfloat16"]:
        assert 1e-7 < moved < 1e-5 and dtypes == {torch.float32}
        assert list(handed_out) == list(original)
        for name, tensor in handed_out.items():
            assert tensor.dtype == torch.bfloat16
            torch.testing.assert_close(tensor, original[name].detach(), atol=1e-5, rtol=2**-8)


def test_a_module_that_only_infers_keeps_its_type(seen: dict[str, list[Any]]) -> None:
    one = Engine(PolicyNetwork(CausalLM(tiny_model("llama").bfloat16())), EngineConfig(), CPU)
    held = 0
    for rank, (log_probs, numbers, dtypes) in enumerate(seen["see_reference"]):
        torch.testing.assert_close(log_probs, one.infer(rows_of(rank), "log_probs"), atol=0.05, rtol=0)
        assert dtypes == {torch.bfloat16}
        held += numbers
    assert held == PARAMETERS


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(seen: dict[str, list[Any]]) -> None:
    for skipped, has_update, pair in seen["see_bad_gradient"]:
        assert skipped == 1 and not has_update
        assert_unchanged(pair)


def test_no_token_on_any_rank_changes_nothing(seen: dict[str, list[Any]]) -> None:
    for grad_norm, pair, inferred in seen["see_no_tokens"]:
        assert grad_norm == 0 and inferred == 0
        assert_unchanged(pair)


def test_ranks_of_unequal_lengths_make_equally_many_passes(seen: dict[str, list[Any]]) -> None:
    one = build(mesh=Mesh.single())
    batch = sampled_batch([4, 4, 4, 4, 1, 1, 1, 1], [3, 3, 3, 3, 1, 1, 1, 1])
    expected = one.update(batch, log_prob_loss, lr=1e-3).result()
    for passes, result in seen["see_unequal_ranks"]:
        assert passes == 4
        assert result == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_gradients_are_reduced_once_where_weights_stay_gathered(seen: dict[str, list[Any]]) -> None:
    for each_time, once in seen["see_collectives"]:
        assert (each_time["reduce_scatter"], once["reduce_scatter"]) == (2 * 3, 3)
        # a layer is gathered in both passes of each of two micro-batches, the rest in one pass, or all of it once
        assert each_time["all_gather"] - once["all_gather"] == (2 * 2 * 2 + 2) - 3


def test_whole_weights_take_one_gathering_a_unit(seen: dict[str, list[Any]]) -> None:
    start = dict(tiny_model("llama").named_parameters())
    for ((first, collectives), (later, _)), expected, last in seen["see_whole_weights"]:
        assert list(first) == list(start)
        assert_unchanged([first, start])
        assert_unchanged([last, expected])
        assert any(not torch.equal(later[name], first[name]) for name in first)
        assert collectives == {"all_gather": 4}  # the embedding, two layers, norm and head


def test_a_resumed_optimizer_goes_on_as_if_there_had_been_no_break(seen: dict[str, list[Any]]) -> None:
    for pair in seen["see_resumed"]:
        assert_unchanged(pair)


def test_frozen_weights_stay(seen: dict[str, list[Any]]) -> None:
    assert seen["see_frozen"] == [["model.embed_tokens.weight"]] * 2
