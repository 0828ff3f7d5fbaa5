"""Workers as objects of this process: one rank of each role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.recipes import batch_of, recipe_of, same
from verl.common.errors import StaleWeights
from verl.controller import Place
from verl.rollout.base import Request
from verl.workers.recipe import Recipe
from verl.workers.served import EngineWorker, RolloutWorker

PPO = {"algorithm": {"name": "ppo", "kl_coef": 0.1}}


def update(worker: EngineWorker, lr: float = 0.1) -> dict[str, float]:
    state = worker.algorithm.state_dict()
    return worker.update([batch_of([3, 2, 4])], lr=lr, entropy=False, algorithm=state).result()


def full(worker: EngineWorker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.engine.named_full_tensors()}


def greedy(rollout: RolloutWorker, recipe: Recipe) -> list[Any]:
    sampling = recipe.rollout.sampling(temperature=0.0)
    return rollout.generate([Request(prompt_ids=[1, 2], seed=0, sampling=sampling)])[0].log_probs


@pytest.mark.parametrize(
    ("role", "column"), [("actor", "old_log_probs"), ("critic", "values"), ("reference", "ref_log_probs")]
)
def test_infer_gives_the_roles_column_alone(tmp_path: Path, role: str, column: str) -> None:
    worker = EngineWorker(Place(), role, recipe_of(tmp_path, **PPO))
    found = worker.infer(batch_of([3, 0, 2]))
    assert list(found.names) == [column] and found.lengths(column).tolist() == [3, 0, 2]
    assert len(worker.infer(batch_of([]))) == 0


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_an_update_changes_the_weights_and_says_so(tmp_path: Path, role: str) -> None:
    worker = EngineWorker(Place(), role, recipe_of(tmp_path, **PPO))
    before = full(worker)
    metrics = update(worker, lr=0.1)
    assert metrics[f"{role}/lr"] == 0.1 and metrics[f"{role}/grad_norm"] > 0
    assert not same(before, full(worker))


def test_the_algorithms_state_comes_with_the_call(tmp_path: Path) -> None:
    worker = EngineWorker(Place(), "actor", recipe_of(tmp_path, algorithm={"name": "ppo", "kl_target": 0.1}))
    state = {**worker.algorithm.state_dict(), "kl_coef": 0.625}
    worker.update([batch_of([3])], lr=0.1, entropy=False, algorithm=state)
    assert worker.algorithm.state_dict() == state


def test_weights_go_out_in_buckets_and_come_in_whole(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    actor = EngineWorker(Place(), "actor", recipe)
    rollout = RolloutWorker(Place(), recipe)
    before = greedy(rollout, recipe)
    update(actor)
    actor.begin_weights(bucket_bytes=4000)
    names, sizes = [], []
    while bucket := actor.next_weights():
        rollout.take_weights(bucket)
        names += [name for name, _ in bucket]
        sizes.append(sum(tensor.nbytes for _, tensor in bucket))
    rollout.finish_weights(3)
    assert names == list(full(actor)) and len(sizes) > 1 and max(sizes) <= 4000
    assert rollout.version() == 3 and greedy(rollout, recipe) != before
    beside = RolloutWorker(Place(colocated={"actor": actor}), recipe)
    assert greedy(rollout, recipe) == greedy(beside, recipe)


def test_a_set_of_weights_that_is_not_whole_is_not_sampled_from(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    rollout = RolloutWorker(Place(), recipe)
    with pytest.raises(StaleWeights, match="no weights of version 1"):
        rollout.finish_weights(1)
    actor = EngineWorker(Place(), "actor", recipe)
    actor.begin_weights(bucket_bytes=4000)
    rollout.take_weights(actor.next_weights())
    with pytest.raises(StaleWeights):
        rollout.finish_weights(1)
    with pytest.raises(StaleWeights):
        greedy(rollout, recipe)
    assert rollout.version() == 0


def test_a_rollout_beside_a_whole_actor_has_its_weights(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    actor = EngineWorker(Place(), "actor", recipe)
    rollout = RolloutWorker(Place(colocated={"actor": actor}), recipe)
    before = greedy(rollout, recipe)
    update(actor)
    rollout.refresh(1)
    assert rollout.version() == 1 and greedy(rollout, recipe) != before
    assert rollout.stats().decode_steps > 0


def test_what_it_says_of_itself(tmp_path: Path) -> None:
    worker = EngineWorker(Place(), "actor", recipe_of(tmp_path))
    assert worker.device_name() == "cpu" and worker.peak_memory_bytes() > 1 << 20
    assert worker.checkpoint_bytes() == 3 * 4 * sum(p.numel() for p in worker.module.parameters())
