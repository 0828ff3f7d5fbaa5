"""What stands for workers in the loop's process, over workers that are in it too."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.batches import sampled_batch
from tests.workers.recipes import batch_of, recipe_of
from verl.common.background import Background
from verl.common.errors import ConfigError, StaleWeights, WorkerError
from verl.controller import Controller, Place, ResourcePool, broadcast, dispatch
from verl.controller.rows import shard_bounds
from verl.rollout.base import Request, RolloutStats
from verl.workers import remote
from verl.workers.recipe import Recipe
from verl.workers.remote import RemoteEngine, RemoteRollout, RemoteSnapshot, RemoteWeights, summed, work_shards
from verl.workers.served import EngineWorker, RolloutWorker

ONE = ResourcePool(1, kind="cpu")


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return recipe_of(tmp_path)


@pytest.fixture
def controller() -> Iterator[Controller]:
    with Controller("inprocess") as made:
        yield made


def actor_of(controller: Controller, recipe: Recipe, pool: ResourcePool) -> RemoteEngine:
    group = controller.group("actor", EngineWorker, pool, role="actor", recipe=recipe)
    return RemoteEngine(group, recipe.make_algorithm(torch.float32), "old_log_probs")


def update(actor: RemoteEngine) -> dict[str, float]:
    return actor.update(batch_of([3, 1, 2]), lambda *_: None, lr=0.1).result()


def test_numbers_come_back_in_the_order_of_the_batch(controller: Controller, recipe: Recipe) -> None:
    actor, batch = actor_of(controller, recipe, ONE), batch_of([3, 0, 6, 1])
    found = actor.infer(batch, "log_probs")
    alone = [actor.infer(batch.select([row]), "log_probs") for row in range(4)]
    assert [len(piece) for piece in alone] == [3, 0, 6, 1]
    assert torch.allclose(found, torch.cat(alone), atol=1e-6)
    assert len(actor.infer(batch_of([]), "log_probs")) == 0
    assert len(actor.infer(batch_of([0, 0]), "log_probs")) == 0


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_get_near_equal_work(ranks: int) -> None:
    lengths = [9, 1, 1, 1, 8, 1, 1]
    shards = work_shards(sampled_batch([0] * 7, lengths), ranks)
    assert sorted(row for shard in shards for row in shard) == list(range(7))
    assert [len(shard) for shard in shards] == [stop - start for start, stop in shard_bounds(7, ranks)]
    work = [sum(lengths[row] for row in shard) for shard in shards]
    assert max(work) <= 11, "the two long rows are on different ranks"


def test_the_answers_of_a_pair_go_to_one_rank() -> None:
    batch = sampled_batch([1] * 6, [3, 1, 4, 1, 5, 9])
    batch.put("pair_id", torch.tensor([0, 1, 2, 2, 1, 0]))
    shards = work_shards(batch, 2)
    assert sorted(map(sorted, shards)) == [[0, 5], [1, 2, 3, 4]]
    assert [len(shard) for shard in shards] == [4, 2]


def test_updates_must_be_synced_before_sampling(controller: Controller, recipe: Recipe) -> None:
    actor = actor_of(controller, recipe, ONE)
    rollout = RemoteRollout(controller.group("rollout", RolloutWorker, ONE, recipe=recipe))
    weights = RemoteWeights(actor, rollout, is_colocated=True)
    weights.set_version(4)
    weights.check()
    assert update(actor)["actor/lr"] == 0.1
    with pytest.raises(StaleWeights, match="after version 4"):
        weights.check()
    weights.sync()
    weights.check()
    assert weights.version == rollout.policy_version == 5
    rollout.group.refresh(9).get()
    with pytest.raises(StaleWeights, match=r"ranks are at versions \[9\], the actor's is 5"):
        weights.check()


def test_a_rollout_of_its_own_gets_every_weight(
    controller: Controller, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In buckets that hold a part of the model; afterwards it samples as one that shares the actor's weights."""
    monkeypatch.setattr(remote, "BUCKET_BYTES", 2000)
    actor = actor_of(controller, recipe, ONE)
    apart = RemoteRollout(controller.group("apart", RolloutWorker, ResourcePool(1, kind="cpu"), recipe=recipe))
    beside = RemoteRollout(controller.group("beside", RolloutWorker, ONE, recipe=recipe))
    sampling = recipe.rollout.sampling()
    requests = [Request(prompt_ids=[1, 2, i], seed=i, sampling=sampling) for i in range(5)]
    first = apart.generate(requests)
    update(actor)
    RemoteWeights(actor, apart, is_colocated=False).set_version(1)
    RemoteWeights(actor, beside, is_colocated=True).set_version(1)
    second = apart.generate(requests)
    assert second != first and second == beside.generate(requests)
    assert [response.policy_version for response in second] == [1] * 5
    assert apart.stats.prefill_tokens + apart.stats.cached_prompt_tokens == 15


def test_a_pause_stops_at_the_border(controller: Controller, recipe: Recipe) -> None:
    rollout = RemoteRollout(controller.group("rollout", RolloutWorker, ONE, recipe=recipe))
    with pytest.raises(ConfigError, match="should_pause"):
        rollout.generate([], should_pause=lambda: False)
    assert rollout.generate([]) == []
    rollout.sleep()
    rollout.wake()


class Writers:
    """Writers of a checkpoint, of which the second one fails at once and the first one takes its time."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._writing = Background("writes")

    @dispatch(broadcast)
    def write_snapshot(self, folder: Path) -> None:
        self._writing.start(partial(self.write, folder))

    def write(self, folder: Path) -> None:
        if self.place.rank:
            raise OSError(errno.ENOSPC, "no space is left")
        time.sleep(0.5)
        (folder / "late").touch()

    is_writing, end_writing = EngineWorker.is_writing, EngineWorker.end_writing


def test_a_checkpoint_that_a_rank_cannot_write_fails_when_all_have_ended(tmp_path: Path) -> None:
    """Whoever removes the half of it is alone in its folder."""
    with Controller("processes") as controller:
        group = controller.group("actor", Writers, ResourcePool(2, kind="cpu"))
        with pytest.raises(WorkerError, match=r"(?s)rank 1: end_writing raised.*no space is left"):
            RemoteSnapshot(group).write(tmp_path)
        assert (tmp_path / "late").exists()


def test_counts_add_up_and_seconds_are_those_of_the_slowest() -> None:
    one = RolloutStats(prefill_tokens=3, decode_steps=7, preemptions=1, extra={"wait_s": 0.5, "blocks": 2.0})
    other = RolloutStats(prefill_tokens=4, cached_prompt_tokens=2, decode_steps=5, extra={"wait_s": 0.7, "blocks": 1.0})
    both = RolloutStats(
        prefill_tokens=7, cached_prompt_tokens=2, decode_steps=7, preemptions=1, extra={"wait_s": 0.7, "blocks": 3.0}
    )
    assert summed([one, other]) == both and summed([]) == RolloutStats()
