"""Runs that go wrong: what they say, when they stop, and that the newest checkpoint is one to go on from."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import tiny_folder
from tests.trainer.runs import checkpoints_of, metrics_of, sections
from verl.common.errors import NotFinite
from verl.trainer.ppo_trainer import PPOTrainer

HUGE = 3e38


def start(folder: Path, reward: Any = None, **changes: Any) -> PPOTrainer:
    keys = sections(folder, **changes)
    if reward is not None:
        keys["reward"] = {"function": reward, "workers": 0}
    return PPOTrainer(**keys)


def run(folder: Path, reward: Any = None, steps: int | None = None, **changes: Any) -> None:
    trainer = start(folder, reward, **changes)
    try:
        trainer.run(steps)
    finally:
        trainer.close()


def actor_weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "run" / "checkpoints" / f"step_{step:06d}" / "actor" / "model" / "model.safetensors")


def overflowing(until: int = 10**9) -> Callable[[str, str, str], float]:
    """A reward whose first ``until`` scores differ by more than a float32 sum over a few tokens can hold."""
    calls = count()

    def score(prompt: str, response: str, ground_truth: str) -> float:
        number = next(calls)
        return HUGE * (-1) ** number if number < until else float(number % 2)

    return score


def test_weights_that_are_damaged_from_the_start_are_those_of_model_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A row of the embedding that only these prompts read."""
    path = tiny_folder(tmp_path / "model") / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][-1] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(NotFinite, match=r"not finite numbers.*model\.path"):
        run(tmp_path, steps=2, model={"path": str(path.parent)})
    assert f"those of model.path='{path.parent}' are damaged" in caplog.text and "optim.lr" not in caplog.text


@pytest.mark.parametrize("save_every", [1, None])
def test_an_exploding_learning_rate_leaves_the_last_good_state_newest(
    save_every: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = {"actor__optim__lr": 0.01, "trainer__save_every": 1}
    run(tmp_path, steps=2, **good)
    kept = actor_weights(tmp_path, 2)
    with pytest.raises(NotFinite):
        run(tmp_path, steps=6, **{**good, "actor__optim__lr": 1e20, "trainer__save_every": save_every})
    assert checkpoints_of(tmp_path / "run") == ["step_000001", "step_000002"]
    assert "nothing is saved of them; the newest checkpoint is of step 2. Lower actor.optim.lr" in caplog.text
    run(tmp_path, steps=4, **good)  # the owner lowers it again, and the run goes on
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1, 2, 3, 4]
    assert all(tensor.isfinite().all() for tensor in actor_weights(tmp_path, 4).values())
    assert not all(torch.equal(tensor, kept[name]) for name, tensor in actor_weights(tmp_path, 4).items())


def test_updates_left_out_in_a_row_stop_the_run_after_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start(
        tmp_path, overflowing(), algorithm={"name": "dr_grpo"}, trainer__total_steps=9,
        trainer__max_skipped_in_a_row=3, rollout__max_response_tokens=6,
    )  # fmt: skip
    before = {name: p.detach().clone() for name, p in trainer.parts.roles.module.named_parameters()}
    with pytest.raises(NotFinite, match=r"step 3: the last 3 updates of the actor .*max_skipped_in_a_row=3\)"):
        trainer.run()
    trainer.close()
    lines = metrics_of(tmp_path / "run")
    assert [line["actor/skipped_in_a_row/max"] for line in lines] == [1, 2, 3]
    assert [line["actor/skipped_updates/sum"] for line in lines] == [1, 1, 1]
    assert checkpoints_of(tmp_path / "run") == ["step_000003"]
    saved = actor_weights(tmp_path, 3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in saved.items())
    assert "step 1: actor/skipped_updates/sum is 1, at least 1: updates whose loss or gradient" in caplog.text


def test_a_single_bad_update_is_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    run(tmp_path, overflowing(until=8), 3, algorithm={"name": "dr_grpo"}, trainer__max_skipped_in_a_row=2)
    lines = metrics_of(tmp_path / "run")
    assert [line["actor/skipped_in_a_row/max"] for line in lines] == [1, 0, 0]


def test_a_reward_without_variance_is_said_and_a_resumed_run_knows_what_went_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def same(prompt: str, response: str, ground_truth: str) -> float:
        return 0.7

    run(tmp_path, same, 2)
    assert "reward/score/std" not in caplog.text
    run(tmp_path, same, 4)
    said = [record.message for record in caplog.records if "all responses get the same reward" in record.message]
    assert len(said) == 1 and said[0].startswith("step 3: reward/score/std is ")
