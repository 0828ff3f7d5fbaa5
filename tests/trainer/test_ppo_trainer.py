from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from tests.processes import is_gone
from tests.tiny import tiny_folder, tiny_model, word_tokenizer
from tests.trainer.rewards import digits
from tests.trainer.runs import REWARDS, checkpoints_of, environment, metrics_of, prompts, rollouts_of, sections
from verl.common.errors import ConfigError, DataError, RewardError, RunIncomplete, StaleWeights
from verl.rewards.base import RewardItem
from verl.trainer.families import run_class
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.reward_model import RewardModel
from verl.trainer.sections import OnPolicyRun

WORDS = [{"prompt": f"w{10 + i} w7", "ground_truth": str(i)} for i in range(6)]


def trainer_of(folder: Path, **changes: Any) -> PPOTrainer:
    folder.mkdir(exist_ok=True)
    return PPOTrainer.from_config(OnPolicyRun.parse(sections(folder, **changes)))


def run_lines(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    trainer = trainer_of(folder, **changes)
    trainer.run()
    trainer.close()
    return metrics_of(folder / "run")


def small(folder: Path, **sections: Any) -> dict[str, Any]:
    """Sections for a trainer that is built in Python."""
    return {
        "rollout": {"max_response_tokens": 4},
        "actor": {"optim": {"lr": 0.01}},
        "track": {"trackers": []},
        "trainer": {"output_dir": str(folder / "run"), "prompts_per_step": 2, "group_size": 2, "device": "cpu"},
        **sections,
    }


def test_two_trainers_of_one_program_each_have_a_folder_and_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = {key: value for key, value in small(tmp_path).items() if key != "trainer"}
    for _ in range(2):
        trainer = PPOTrainer(tiny_model("llama"), WORDS, digits, tokenizer=word_tokenizer(), **keys)
        assert trainer.run().steps == 1 and len(trainer.metrics) > 1
        trainer.close()
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 2 and all(len(metrics_of(folder)) == 1 for folder in folders)


@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_without_learning_the_policy_stays_its_own_old_self(tmp_path: Path, algorithm: str, mini_batches: int) -> None:
    """Sampler, old policy, policy and reference are one distribution at temperature 0.5."""
    lines = run_lines(
        tmp_path,
        algorithm={"name": algorithm, "kl_coef": 0.1},
        rollout__temperature=0.5,
        actor__optim__lr=0.0,
        actor__mini_batches_per_epoch=mini_batches,
        trainer__total_steps=3,
    )
    assert len(lines) == 3
    for line in lines:
        for stat in ("mean", "max", "min"):
            assert line[f"actor/ratio/{stat}"] == pytest.approx(1, abs=1e-4)
        assert abs(line["actor/reward_kl" if algorithm == "ppo" else "actor/kl"]) < 1e-5
        assert line["actor/rollout_log_prob_diff/max"] < 1e-5
        assert abs(line["actor/approx_kl"]) < 1e-5


def test_rollout_and_training_agree_while_the_policy_moves(tmp_path: Path) -> None:
    lines = run_lines(
        tmp_path, rollout__temperature=0.7, actor__mini_batches_per_epoch=2, actor__epochs_per_step=2,
        trainer__total_steps=4,
    )  # fmt: skip
    assert all(line["actor/rollout_log_prob_diff/max"] < 1e-5 for line in lines)
    assert all(line["actor/ratio/max"] > 1.001 for line in lines)  # of the later updates


def test_a_logged_log_prob_is_the_tempered_one(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, rollout__temperature=0.5, trainer__total_steps=1, actor__optim__lr=0.0)
    trainer.run()
    trainer.close()
    (rows,) = rollouts_of(tmp_path / "run").values()
    encode = trainer.parts.tokenizer
    row = next(r for r in rows if r["finish_reason"] == "length")
    prompt, response = encode(row["prompt"], add_special_tokens=False)["input_ids"], row["response_ids"]
    plain = type(trainer.parts.roles.module)(trainer.parts.roles.module.config)
    plain.load_state_dict(trainer.parts.roles.module.state_dict())
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
    expected = (logits / 0.5).log_softmax(-1)[torch.arange(len(response)), response]
    torch.testing.assert_close(torch.tensor(row["log_probs"]), expected, atol=1e-5, rtol=0)


def test_generation_config_of_the_model_changes_nothing(tmp_path: Path) -> None:
    runs = {}
    for name in ("plain", "leaky"):
        folder = tiny_folder(tmp_path / name)
        if name == "leaky":
            leak = {"repetition_penalty": 1.1, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True}
            (folder / "generation_config.json").write_text(json.dumps(leak))
        trainer = PPOTrainer(
            str(folder), WORDS, lambda response: len(response) / 9,
            **small(tmp_path, trainer={**small(tmp_path)["trainer"], "output_dir": str(tmp_path / f"run-{name}")}),
        )  # fmt: skip
        trainer.run(num_steps=2)
        trainer.close()
        runs[name] = (rollouts_of(tmp_path / f"run-{name}"), metrics_of(tmp_path / f"run-{name}"))
    assert runs["plain"] == runs["leaky"]
    kept = json.loads((tmp_path / "run-leaky/checkpoints/step_000002/actor/model/generation_config.json").read_text())
    assert kept["top_k"] == 20  # the model's own file is carried, not used


class Longest(RewardModel):
    def __init__(self) -> None:
        pass

    def score_items(self, items: Any) -> list[float]:
        assert all(isinstance(item, RewardItem) for item in items)
        return [len(item.response_ids) / 4 for item in items]


@pytest.mark.parametrize("kind", ["module", "folder", "scratch"])
@pytest.mark.parametrize("data", ["list", "dataset", "file"])
def test_models_and_data_of_every_kind(tmp_path: Path, kind: str, data: str) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in WORDS))
    source = {"list": WORDS, "dataset": datasets.Dataset.from_list(WORDS), "file": str(tmp_path / "rows.jsonl")}[data]
    folder = tiny_folder(tmp_path / "model")
    model = {
        "module": tiny_model("llama"),
        "folder": str(folder),
        "scratch": {"scratch": {**tiny_model("llama").config.to_dict(), "model_type": "llama"}},
    }[kind]
    tokenizer = {"module": word_tokenizer(), "folder": None, "scratch": str(folder)}[kind]
    trainer = PPOTrainer(
        model=model, tokenizer=tokenizer, data=source, reward=lambda response: len(response), **small(tmp_path)
    )
    result = trainer.run(num_steps=2)
    trainer.close()
    assert (result.steps, result.exit_code) == (2, 0)
    assert result.metrics["reward/score/mean"] > 0
    assert math.isfinite(result.metrics["actor/grad_norm"])


@pytest.mark.parametrize(
    ("reward", "most"),
    [
        (Longest(), 1.0),
        ({"function": lambda response, bonus: bonus * (len(response) % 2), "kwargs": {"bonus": 3.0}}, 3.0),
        ({"name": "exact", "workers": 0}, 1.0),
        (lambda prompt, response, ground_truth: 7.0, 7.0),
        (lambda prompt, response, ground_truth, **row: {"score": row["row_id"] / 9, "part": 2}, 1.0),
    ],
    ids=["reward model", "keys", "name", "function", "dict"],
)
def test_rewards_of_every_kind(tmp_path: Path, reward: Any, most: float) -> None:
    trainer = PPOTrainer(tiny_model("gpt2"), WORDS, reward, tokenizer=word_tokenizer(), **small(tmp_path))
    metrics = trainer.run(num_steps=1).metrics
    trainer.close()
    assert metrics["reward/score/max"] <= most
    assert metrics["reward/error_count"] == metrics["reward/invalid_count"] == 0
    if most == 7.0:
        assert metrics["reward/score/mean"] == 7.0


def test_a_step_at_a_time(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "steps", trainer__total_steps=3)
    for _ in range(3):
        metrics = trainer.step()
    assert trainer.steps_done == 3 and metrics["rollout/policy_version"] == 2
    trainer.close()
    assert checkpoints_of(tmp_path / "steps" / "run") == ["step_000003"]
    assert metrics_of(tmp_path / "steps" / "run") == run_lines(tmp_path / "run", trainer__total_steps=3)


def test_steps_and_runs_count_together(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.step()
    assert trainer.run(num_steps=2).steps == 2
    assert trainer.run(num_steps=3).steps == 5
    trainer.close()
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1, 2, 3, 4, 5]
    with pytest.raises(ConfigError, match="num_steps must be a whole number, at least 1, got 0"):
        trainer.run(num_steps=0)


def test_the_schedule_spans_the_whole_run_however_it_is_cut(tmp_path: Path) -> None:
    """Linear to zero over 4 steps: lr * (1 - (step - 1) / 4), also when only two of them are made now."""
    trainer = trainer_of(tmp_path, trainer__total_steps=4, actor__optim__lr=0.4, actor__optim__schedule="linear")
    rates = [trainer.run(num_steps=1).metrics["actor/lr"] for _ in range(4)]
    trainer.close()
    assert rates == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_the_policy_waits_for_a_critic_that_warms_up(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, algorithm={"name": "ppo", "critic_warmup_steps": 2}, trainer__total_steps=4)
    roles = (trainer.parts.roles.actor, trainer.parts.roles.trainable[1])
    assert [role.name for role in roles] == ["actor", "critic"]
    before = [{name: p.clone() for name, p in role.engine.named_full_tensors()} for role in roles]
    versions, changed = [], []
    for _ in range(4):
        metrics = trainer.step()
        versions.append(metrics["rollout/policy_version"])
        now = [dict(role.engine.named_full_tensors()) for role in roles]
        changed.append([any(not torch.equal(a[name], b[name]) for name in a) for a, b in zip(before, now, strict=True)])
        assert ("actor/policy_loss" in metrics) is ("perf/train_tokens_per_s" in metrics) is changed[-1][0]
    trainer.close()
    assert versions == [0, 0, 0, 1]
    assert changed == [[False, True], [False, True], [True, True], [True, True]]


def test_data_that_end_before_the_steps_do(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, trainer__total_steps=None, trainer__epochs=1)
    with pytest.raises(RunIncomplete, match=r"data end after step 4 of 9.*trainer\.epochs"):
        trainer.run(num_steps=9)
    assert trainer.steps_done == 4
    assert checkpoints_of(tmp_path / "run") == ["step_000004"]
    with pytest.raises(RunIncomplete, match="data end after step 4"):
        trainer.step()
    trainer.close()


def test_without_steps_or_epochs_it_is_one_epoch(tmp_path: Path) -> None:
    assert len(run_lines(tmp_path, rows=5, trainer__total_steps=None)) == 3


def test_a_last_short_batch_with_more_mini_batches_than_rows(tmp_path: Path) -> None:
    changes = {"trainer__total_steps": None, "trainer__epochs": 1, "actor__mini_batches_per_epoch": 8}
    lines = run_lines(tmp_path, rows=3, **changes)
    assert len(lines) == 2 and lines[1]["algorithm/groups"] == 1


@pytest.mark.parametrize(
    ("steps", "more"),
    [([2], {}), ([2], {"profile__record": ["stacks", "memory"], "profile__ranks": [0]}), ([], {})],
)
def test_traces_of_the_chosen_steps_only(tmp_path: Path, steps: list[int], more: dict[str, Any]) -> None:
    run_lines(tmp_path, profile__steps=steps, trainer__total_steps=4, **more)
    traces = tmp_path / "run" / "traces"
    assert [p.name for p in traces.glob("*")] == (["step_000002.rank0.json"] if steps else [])
    assert traces.exists() is bool(steps)
    if steps:
        assert len(json.loads((traces / "step_000002.rank0.json").read_text())["traceEvents"]) > 10


@pytest.mark.parametrize("selection", [{"profile__steps": [9]}, {"profile__steps": [1], "profile__ranks": [9]}])
def test_a_trace_of_a_step_or_rank_that_never_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, selection: dict[str, Any]
) -> None:
    run_lines(tmp_path, **selection)
    assert "9" in caplog.text and not (tmp_path / "run" / "traces").exists()


def test_failed_rewards_are_counted_and_left_out(tmp_path: Path) -> None:
    (line,) = run_lines(
        tmp_path, rows=4, reward={"function": f"{REWARDS}:fails_on_one", "workers": 0},
        trainer__prompts_per_step=4, trainer__total_steps=1,
    )  # fmt: skip
    assert (line["reward/error_count"], line["reward/invalid_count"]) == (4, 4)
    assert line["algorithm/rows_excluded"] == 8
    (rows,) = rollouts_of(tmp_path / "run").values()
    assert {row["row_id"] for row in rows if row["score"] is None} == {1, 2}


def test_a_reward_that_fails_on_every_row_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"failed on all 8 responses; the first: .*boom"):
        run_lines(tmp_path, reward={"function": f"{REWARDS}:boom", "workers": 0})


def test_a_reward_that_hangs_costs_its_rows_only(tmp_path: Path) -> None:
    (line,) = run_lines(
        tmp_path, rows=2, reward={"function": f"{REWARDS}:hangs_on_one", "workers": 2, "timeout_s": 0.3},
        trainer__total_steps=1, trainer__group_size=2,
    )  # fmt: skip
    assert line["reward/timeout_count"] == 2 and line["algorithm/rows_excluded"] == 2


def test_an_update_outside_the_loop_is_noticed(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.step()
    trainer.parts.roles.actor.engine.has_unsynced_update = True
    with pytest.raises(StaleWeights, match="after version 1"):
        trainer.step()
    trainer.close()


def test_a_script_without_a_main_guard_runs_and_leaves_nobody(tmp_path: Path) -> None:
    """The user's file runs once, its function scores in worker processes, and nothing outlives it without ``close``."""
    tiny_folder(tmp_path / "model")
    (tmp_path / "train.py").write_text(f"""
import os, sys
open({str(tmp_path / "started")!r}, "a").write("x")
from verl.trainer.ppo_trainer import PPOTrainer

def score(prompt, response, ground_truth, bonus=0):
    open({str(tmp_path)!r} + f"/pid{{os.getpid()}}", "w").close()
    return len(response) + bonus

trainer = PPOTrainer(
    model="model", data=[{{"prompt": "w9", "ground_truth": "w8"}}] * 2,
    reward={{"function": score, "kwargs": {{"bonus": 1}}}},
    rollout={{"max_response_tokens": 3}}, track={{"trackers": []}},
    trainer={{"output_dir": "run", "prompts_per_step": 2, "group_size": 2, "device": "cpu"}},
)
print(trainer.run(num_steps=2).steps, os.getpid())
""")
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    steps, own = done.stdout.split()
    assert steps == "2" and (tmp_path / "started").read_text() == "x"
    pids = [path.name.removeprefix("pid") for path in tmp_path.glob("pid*")]
    assert pids and own not in pids
    assert all(is_gone(int(pid)) for pid in pids)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model": 3}, ConfigError, "model must be a folder or hub name"),
        ({"model": "/nowhere/at/all"}, DataError, "model.path='/nowhere/at/all' is no folder"),
        ({"data": []}, ConfigError, "data.train: an empty list"),
        ({"data": datasets.Dataset.from_list([])}, DataError, "data.train: the data set is empty"),
        ({"data": None}, ConfigError, "data.train names no data"),
        ({"data": [{"question": "w9"}]}, DataError, "data.prompt_key: no column 'prompt'"),
        ({"reward": None}, ConfigError, "one reward"),
        ({"reward": "exactt"}, ConfigError, "did you mean 'exact'"),
        ({"reward": 5}, ConfigError, "a reward is a function"),
        ({"algorithm": "gpro"}, ConfigError, "did you mean 'grpo'"),
        ({"actr": {}}, ConfigError, "unknown key 'actr'; did you mean 'actor'"),
        ({"tokenizer": None}, ConfigError, "needs tokenizer="),
    ],
)
def test_wrong_arguments(tmp_path: Path, change: dict[str, Any], error: type[Exception], words: str) -> None:
    good = {"model": tiny_model("llama"), "data": WORDS, "reward": digits, "tokenizer": word_tokenizer()}
    with pytest.raises(error) as caught:
        PPOTrainer(**{**good, **small(tmp_path), **change})
    assert words in str(caught.value)


def test_an_unset_prompt_key_and_unused_columns_reach_the_reward(tmp_path: Path) -> None:
    rows = [{**row, "level": i} for i, row in enumerate(WORDS)]
    seen = []

    def reward(response: str, level: int) -> float:
        seen.append(level)
        return float(level)

    keys = {"function": reward, "workers": 0}
    trainer = PPOTrainer(tiny_model("llama"), rows, keys, tokenizer=word_tokenizer(), **small(tmp_path))
    trainer.run(num_steps=3)
    trainer.close()
    assert sorted(seen) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_prompts_are_the_rows_of_the_file(tmp_path: Path) -> None:
    run_lines(tmp_path, trainer__total_steps=4)
    for rows in rollouts_of(tmp_path / "run").values():
        for row in rows:
            assert row["prompt"] == prompts(8)[row["row_id"]]["prompt"]
            assert row["ground_truth"] == str(row["row_id"])


def test_a_config_of_another_family_is_named() -> None:
    config = run_class("sft").parse({"model": {"path": "m"}, "data": {"train": "d"}, "algorithm": "sft"})
    with pytest.raises(ConfigError, match=r"'sft' is of the family 'supervised', and PPOTrainer is for 'on_policy'"):
        PPOTrainer.from_config(config)
