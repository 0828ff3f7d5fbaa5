"""Two and four gloo ranks take snapshots, learn on, and write what was."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.batches import sampled_batch
from tests.engines.test_fsdp import log_prob_loss
from tests.ranks import RankFailed, run_ranks
from tests.tiny import tiny_model, word_tokenizer
from verl.common.errors import CheckpointError
from verl.engines.base import TrainingEngine
from verl.engines.config import TrainedConfig
from verl.engines.fsdp import local_part
from verl.engines.mesh import Mesh, ParallelConfig
from verl.models.causal_lm import CausalLM
from verl.models.networks import PolicyNetwork, ValueNetwork

CPU = torch.device("cpu")
SHAPE = {"num_attention_heads": 2, "num_key_value_heads": 2}


def build(dtype: torch.dtype = torch.float32, value: bool = False, **sizes: int) -> TrainingEngine:
    module = tiny_model("qwen3", shape=SHAPE).to(dtype)
    network = ValueNetwork(module) if value else PolicyNetwork(CausalLM(module))
    return TrainingEngine(network, TrainedConfig(), CPU, "actor", Mesh.build(ParallelConfig(**sizes), "cpu"))


def learn(engine: TrainingEngine) -> None:
    batch = sampled_batch([3, 5, 2, 4], [4, 2, 6, 3])
    share = [[0, 2], [1, 3]][engine.mesh.dp_rank] if engine.mesh.dp_size > 1 else range(4)
    engine.update(batch.select(share), log_prob_loss, lr=1e-2)


def held(engine: TrainingEngine) -> list[Tensor]:
    """All that a checkpoint must bring back, as this rank has it."""
    moments = [state[kind] for state in engine.optimizer.state.values() for kind in sorted(state)]
    return [local_part(t).detach().clone() for t in (*engine.masters.masters.values(), *moments)]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def see_written_later(rank: int, folder: Path) -> list[Any]:
    """Take, learn on, write beside further learning; a new engine takes up what was at the moment of the taking."""
    return [see_one(rank, folder / name, *case) for name, case in CASES.items()]


CASES: dict[str, tuple[torch.dtype, dict[str, int]]] = {
    "tp": (torch.bfloat16, {"tensor_parallel_size": 2}),
    "pp": (torch.float32, {"pipeline_parallel_size": 2}),
}


def see_one(rank: int, folder: Path, dtype: torch.dtype, sizes: dict[str, int]) -> Any:
    engine = build(dtype, **sizes)
    learn(engine)
    then = held(engine)
    snapshot = engine.snapshot(word_tokenizer())
    writer = threading.Thread(target=snapshot.write, args=(folder,))
    learn(engine)
    time.sleep(0.1 * rank)  # ranks begin when they can
    writer.start()
    learn(engine)
    writer.join()
    dist.barrier()
    other = build(dtype, **sizes)
    other.restore(folder)
    return equal(held(other), then), equal(held(engine), then), len(snapshot.weights), engine.checkpoint_bytes()


def test_what_is_written_is_of_the_moment_of_the_snapshot(tmp_path: Path) -> None:
    parameters = sum(p.numel() for p in tiny_model("qwen3", shape=SHAPE).parameters())
    ranks = run_ranks(4, see_written_later, tmp_path)
    for (name, (dtype, _)), seen in zip(CASES.items(), zip(*ranks, strict=True), strict=True):
        assert [is_restored for is_restored, *_ in seen] == [True] * 4, name
        assert not any(stayed for _, stayed, *_ in seen), "learning on must have changed what the snapshot holds"
        assert [count for *_, count, _ in seen] == [len(list(tiny_model("qwen3").parameters())), 0, 0, 0]
        each = 12 if dtype == torch.float32 else 2 + 4 + 8  # weights, masters, two moments
        assert 0.97 * each * parameters <= sum(size for *_, size in seen) <= each * parameters
        module = AutoModelForCausalLM.from_pretrained(tmp_path / name / "model")
        assert module.dtype == dtype and sum(p.numel() for p in module.parameters()) == parameters


def see_failure(rank: int, folder: Path) -> Any:
    """The first rank can't write the model: the others are through by then, and the next snapshot is written."""
    engine = build()
    learn(engine)
    (folder / "bad").mkdir(exist_ok=True)
    (folder / "bad" / "model").touch()
    try:
        engine.snapshot().write(folder / "bad")
        outcome = "written"
    except OSError:
        outcome = "failed"
    engine.snapshot().write(folder / "good")
    return outcome


def test_a_rank_that_fails_alone_leaves_nobody_waiting(tmp_path: Path) -> None:
    assert run_ranks(2, see_failure, tmp_path, timeout_s=60) == ["failed", "written"]
    assert (tmp_path / "good" / "optimizer" / "optimizer.json").exists()


def test_storage_that_ranks_do_not_share_is_refused(tmp_path: Path) -> None:
    def see(rank: int) -> None:
        engine = build()
        learn(engine)
        engine.snapshot().write(tmp_path / f"of_rank_{rank}")

    with pytest.raises(RankFailed, match=r"1 files that other ranks wrote aren't in .*storage that every worker"):
        run_ranks(2, see)


def test_without_copies_nothing_is_copied(tmp_path: Path) -> None:
    engine = build(value=True)
    learn_values(engine)
    live, copied = engine.snapshot(copied=False), engine.snapshot()
    parameters = dict(engine.network.module.named_parameters())
    assert all(live.weights[name].data_ptr() == p.data_ptr() for name, p in parameters.items())
    assert all(copied.weights[name].data_ptr() != p.data_ptr() for name, p in parameters.items())
    live.write(tmp_path / "live")
    copied.write(tmp_path / "copied")
    for path in ("model/critic.safetensors", "optimizer/__0_0.distcp", "optimizer/optimizer.json"):
        assert (tmp_path / "live" / path).read_bytes() == (tmp_path / "copied" / path).read_bytes()


def learn_values(engine: TrainingEngine) -> None:
    def loss(outputs: Any, columns: Any) -> Any:
        return log_prob_loss({"log_probs": outputs["values"]}, columns)

    engine.update(sampled_batch([3, 5], [4, 2]), loss, lr=1e-2)


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    build().snapshot().write(tmp_path)
    module = tiny_model("qwen3", shape={**SHAPE, "hidden_size": 16})
    other = TrainingEngine(PolicyNetwork(CausalLM(module)), TrainedConfig(), CPU, "actor")
    with pytest.raises(CheckpointError, match="there is no tensor of shape"):
        other.restore(tmp_path)
