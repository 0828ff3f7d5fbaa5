from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.rewards import unequal_on_odd_rows
from tests.trainer.runs import checkpoints_of, metrics_of, rollouts_of, sections, write_jsonl
from verl.common.errors import RewardError, RunIncomplete
from verl.observe.metrics import PhaseTimer
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.sampling import Drawn, Sampled, first_groups, sample

ODD = {"algorithm": {"name": "dapo", "max_generations": 3}, "data__shuffle": False}
"""With ``unequal_on_odd_rows`` a group of even row is dropped: of a batch of two prompts, the first."""


@contextmanager
def trainer_of(folder: Path, reward: Any = unequal_on_odd_rows, **changes: Any) -> Iterator[PPOTrainer]:
    folder.mkdir(exist_ok=True)
    made = sections(folder, **changes)
    trainer = PPOTrainer(**{**made, "reward": {"function": reward, "workers": 0}})
    try:
        yield trainer
    finally:
        trainer.close()


def sampled(trainer: PPOTrainer, drawn: Drawn | None = None, step: int = 1) -> Sampled:
    trainer.parts.roles.take_model()
    return sample(trainer.parts, trainer.config.trainer, drawn or Drawn(), step=step, timer=PhaseTimer())


def rows_of(found: Sampled) -> list[int]:
    """Row of each group that is trained on."""
    return found.batch["row_id"].tolist()[::4]


def test_the_first_groups_by_number() -> None:
    keep = torch.tensor([True, False, True, True, False, True])
    group_id = torch.tensor([5, 5, 2, 9, 1, 2])
    expected = {0: [], 1: [2, 5], 2: [0, 2, 5], 3: [0, 2, 3, 5], 9: [0, 2, 3, 5]}
    for count, rows in expected.items():
        assert first_groups(keep, group_id, count).nonzero().flatten().tolist() == rows


def test_without_dropping_it_is_one_batch(tmp_path: Path) -> None:
    with trainer_of(tmp_path, data__shuffle=False) as trainer:
        found = sampled(trainer, Drawn(1))
    assert found.batch is found.everything and rows_of(found) == [2, 3]
    assert found.drawn == Drawn(2)
    assert not {"rollout/generations", "algorithm/groups_dropped"} & found.metrics.keys()


def test_prompts_are_drawn_until_enough_groups_teach(tmp_path: Path) -> None:
    with trainer_of(tmp_path, **ODD) as trainer:
        found = sampled(trainer)
    assert rows_of(found) == [1, 3] and len(found.batch) == 8
    assert found.everything["row_id"].tolist() == [row for row in range(4) for _ in range(4)]
    assert found.everything["group_id"].tolist() == found.everything["row_id"].tolist()
    assert found.drawn == Drawn(2)
    assert found.metrics["rollout/generations"] == 2
    assert found.metrics["algorithm/groups_dropped"] == 2 and found.metrics["algorithm/groups_surplus"] == 0
    everything = found.everything["scores"]
    assert found.metrics["reward/score/mean"] == pytest.approx(float(everything.double().mean()))


def test_the_first_ones_are_kept_of_more_than_enough(tmp_path: Path) -> None:
    def all_but_row_0(response: str, ground_truth: str) -> float:
        return unequal_on_odd_rows(response, "1" if ground_truth != "0" else "0")

    with trainer_of(tmp_path, all_but_row_0, **ODD) as trainer:
        found = sampled(trainer)
    assert rows_of(found) == [1, 2]
    assert found.metrics["algorithm/groups_dropped"] == 1 and found.metrics["algorithm/groups_surplus"] == 1


@pytest.mark.parametrize(("bound", "rows"), [(1, [1]), (2, [1, 3]), (4, [1, 3, 6])])
def test_the_bound_on_regeneration(tmp_path: Path, bound: int, rows: list[int]) -> None:
    """One group of each batch teaches and three are wanted: with fewer batches there is what there is."""
    changes = {**ODD, "algorithm": {"name": "dapo", "max_generations": bound}, "trainer__prompts_per_step": 3}

    def one_of_three(response: str, ground_truth: str) -> float:
        return unequal_on_odd_rows(response, "1" if int(ground_truth) in (1, 3, 6) else "0")

    with trainer_of(tmp_path, one_of_three, rows=12, **changes) as trainer:
        found = sampled(trainer)
    assert rows_of(found) == rows
    assert found.metrics["rollout/generations"] == found.drawn.batches == len(rows)


def test_further_responses_to_a_prompt_are_other_ones(tmp_path: Path) -> None:
    changes = {"rows": 1, "trainer__prompts_per_step": 1, **ODD}
    with trainer_of(tmp_path, lambda response: 1.0, **changes) as trainer:
        found = sampled(trainer)
        again = sampled(trainer)
    assert found.everything["group_id"].unique().tolist() == [0, 1, 2] and len(found.batch) == 0
    texts = [row["response"] for row in found.everything.rows]
    assert len({tuple(texts[i : i + 4]) for i in (0, 4, 8)}) == 3
    assert texts == [row["response"] for row in again.everything.rows]


def test_failed_rewards_end_a_run_only_when_nothing_was_scored(tmp_path: Path) -> None:
    def fails_late(response: str, ground_truth: str) -> float:
        if int(ground_truth) >= 2:
            raise ValueError("no answer")
        return unequal_on_odd_rows(response, ground_truth)

    with trainer_of(tmp_path, fails_late, **ODD) as trainer:
        found = sampled(trainer)
        assert rows_of(found) == [1] and found.metrics["reward/error_count"] == 16
        with pytest.raises(RewardError, match="all 8 responses"):
            sampled(trainer, Drawn(1))


def test_steps_end_with_the_data(tmp_path: Path) -> None:
    """Six rows are three batches: rows 1 and 3 of the first two, row 5 of the third; a last step has what is left."""
    val = write_jsonl(tmp_path / "val.jsonl", [{"prompt": "9+9=", "ground_truth": "18"}])
    changes = {**ODD, "rows": 6, "trainer__total_steps": None, "trainer__epochs": 1, "data__val": str(val)}
    with trainer_of(tmp_path, **changes) as trainer:
        assert trainer.last_step == 3
        assert trainer.run().steps == 2
        assert trainer.last_step == 2 and trainer.drawn == Drawn(3)
        with pytest.raises(RunIncomplete, match="data end after step 2 of 3"):
            trainer.step()
    seen = [{row["row_id"] for row in rows} for rows in rollouts_of(tmp_path / "run").values()]
    assert seen == [{1, 3}, {5}]
    assert "validation/score/mean" in metrics_of(tmp_path / "run")[-1]
    assert checkpoints_of(tmp_path / "run") == ["step_000002"]


def test_a_finished_run_whose_data_have_ended_stays_finished(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    changes = {**ODD, "trainer__total_steps": None, "trainer__epochs": 1}
    with trainer_of(tmp_path, **changes) as trainer:
        trainer.run()
    with caplog.at_level(logging.INFO, "verl"), trainer_of(tmp_path, **changes) as trainer:
        assert trainer.run().steps == 2
        assert "the run is finished, 2 of 2 steps" in caplog.text
        with pytest.raises(RunIncomplete, match="data end after step 2 of 5"):
            trainer.run(num_steps=5)


def test_one_epoch_without_steps_or_epochs(tmp_path: Path) -> None:
    with trainer_of(tmp_path, trainer__total_steps=None, **ODD) as trainer:
        assert trainer.run().steps == 2 and trainer.drawn == Drawn(4)
        trainer.step()
        assert trainer.steps_done == 3, "a further step begins the data again"


@pytest.mark.parametrize("updates", [1, 2])
def test_a_step_with_nothing_to_learn_updates_nothing(
    tmp_path: Path, updates: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows 0 to 3 are equal: two batches; with one batch a step, two steps. The reference's pass has no row either."""

    def late(response: str, ground_truth: str) -> float:
        return unequal_on_odd_rows(response, "1" if int(ground_truth) > 3 else "0")

    changes = {
        "algorithm": {"name": "dapo", "max_generations": 1, "kl_coef": 0.1}, "data__shuffle": False,
        "trainer__total_steps": 4, "actor__mini_batches_per_epoch": updates, "track": {"trackers": ["console"]},
    }  # fmt: skip
    with trainer_of(tmp_path, late, **changes) as trainer:
        before = {name: tensor.clone() for name, tensor in trainer.parts.roles.module.state_dict().items()}
        trainer.run(num_steps=2)
        for name, tensor in trainer.parts.roles.module.state_dict().items():
            assert torch.equal(tensor, before[name]), name
        assert not trainer.parts.roles.actor.engine.optimizer.state
    with trainer_of(tmp_path, late, **changes) as trainer:
        assert trainer.drawn == Drawn(2, empty_steps=2)
        trainer.run()
    lines = metrics_of(tmp_path / "run")
    assert [line["algorithm/empty_steps"] for line in lines] == [1, 2, 0, 0]
    assert ["actor/policy_loss" in line for line in lines] == [False, False, True, True]
    assert [line["algorithm/groups"] for line in lines] == [0, 0, 2, 2]
    assert [len(rows) for rows in rollouts_of(tmp_path / "run").values()] == [0, 0, 8, 8]
    assert caplog.text.count("updates nothing: of 2 groups none teaches anything") == 2


@pytest.mark.parametrize("stop", [1, 9, 20, 33])
def test_a_signal_while_prompts_are_drawn_leaves_the_last_whole_step(tmp_path: Path, stop: int) -> None:
    """16 responses a step, of two batches: the signal comes with response ``stop``, and the run goes on as if not."""
    changes = {**ODD, "trainer__total_steps": 4}
    count = 0

    def stops(response: str, ground_truth: str) -> float:
        nonlocal count
        count += 1
        if count == stop:
            signal.raise_signal(signal.SIGTERM)
        return unequal_on_odd_rows(response, ground_truth)

    with trainer_of(tmp_path / "parts", stops, **changes) as trainer:
        result = trainer.run()
        assert (result.exit_code, result.steps) == (143, (stop - 1) // 16)
        assert trainer.drawn == Drawn(2 * result.steps)
    with trainer_of(tmp_path / "parts", **changes) as trainer:
        trainer.run()
    with trainer_of(tmp_path / "straight", **changes) as trainer:
        trainer.run()
    assert metrics_of(tmp_path / "parts" / "run") == metrics_of(tmp_path / "straight" / "run")
    assert rollouts_of(tmp_path / "parts" / "run") == rollouts_of(tmp_path / "straight" / "run")


def number(response: str) -> float:
    return unequal_on_odd_rows(response, "1")


@pytest.mark.parametrize("group_size", [1, 3])
def test_each_row_has_the_score_of_its_prompts_greedy_response(tmp_path: Path, group_size: int) -> None:
    changes = {"algorithm": "remax", "trainer__group_size": group_size, "data__shuffle": False}
    with trainer_of(tmp_path, number, **changes) as trainer:
        found = sampled(trainer, Drawn(1))
        assert trainer.parts.greedy is not None
        greedy = trainer.parts.greedy.generate(trainer.parts.loader.batch(1), 0)
        (first, second) = (greedy_by_hand(trainer, prompt.prompt_ids) for prompt in trainer.parts.loader.batch(1))
    assert [row["response"] for row in greedy.rows] == [first, second]
    expected = [number(first)] * group_size + [number(second)] * group_size
    assert found.batch["greedy_scores"].tolist() == pytest.approx(expected)
    assert found.metrics["reward/greedy_score/mean"] == pytest.approx((number(first) + number(second)) / 2)
    assert len(found.batch) == 2 * group_size


def greedy_by_hand(trainer: PPOTrainer, prompt_ids: Any) -> str:
    """The likeliest token, four times, by plain forward passes."""
    plain = type(trainer.parts.roles.module)(trainer.parts.roles.module.config)
    plain.load_state_dict(trainer.parts.roles.module.state_dict())
    plain.set_attn_implementation("eager")
    ids = list(prompt_ids)
    for _ in range(4):
        with torch.no_grad():
            ids.append(int(plain(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == trainer.parts.tokenizer.eos_token_id:
            break
    text: str = trainer.parts.tokenizer.decode(ids[len(prompt_ids) :], skip_special_tokens=True)
    return text


def test_a_prompt_whose_greedy_response_cannot_be_scored_takes_no_part(tmp_path: Path) -> None:
    refused: list[str] = []

    def fails_on_greedy(prompt: str, response: str) -> float:
        if [prompt, response] == refused:
            raise ValueError("can't be scored")
        return number(response)

    changes = {"algorithm": "remax", "data__shuffle": False, "trainer__total_steps": 1}
    with trainer_of(tmp_path, fails_on_greedy, **changes) as trainer:
        trainer.parts.roles.take_model()
        assert trainer.parts.greedy is not None
        row = trainer.parts.greedy.generate(trainer.parts.loader.batch(0), 0).rows[1]
        refused += [row["prompt"], row["response"]]
        found = sampled(trainer)
        metrics = trainer.step()
    assert found.batch["greedy_scores"].isnan().tolist() == [False] * 4 + [True] * 4
    assert metrics["algorithm/rows_excluded"] == 4 and metrics["actor/grad_norm"] > 0


def test_who_needs_no_greedy_response_makes_none(tmp_path: Path) -> None:
    with trainer_of(tmp_path, number) as trainer:
        assert trainer.parts.greedy is None and "greedy_scores" not in sampled(trainer).batch
        assert "timing/greedy_s" not in trainer.step()
