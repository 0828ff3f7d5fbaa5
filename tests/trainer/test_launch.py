from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.trainer.runs import prompts, sections, write_jsonl
from verl.common.errors import ConfigError
from verl.trainer.launch import plan, train_run
from verl.trainer.sections import OnPolicyRun
from verl.workers import recipe


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"trainer__total_steps": 7}, 7),
        ({"trainer__total_steps": None}, 4),
        ({"trainer__total_steps": None, "trainer__epochs": 3}, 12),
        ({"trainer__total_steps": None, "rows": 5}, 3),
        ({"trainer__total_steps": None, "trainer__epochs": 3, "rows": 5}, 8),
    ],
)
def test_a_plan_counts_the_steps_that_the_run_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], steps: int
) -> None:
    run = OnPolicyRun.parse(sections(tmp_path, **changes))  # type: ignore[arg-type]
    assert f"# steps: {steps} of 2 prompts × 4 responses" in plan(run)
    from verl.trainer.ppo_trainer import PPOTrainer

    trainer = PPOTrainer.from_config(run)
    trainer.close()
    assert trainer.last_step == trainer.total_steps == steps


@pytest.mark.parametrize(("bound", "steps", "words"), [(3, None, "at most 4"), (1, None, "4"), (3, 7, "7")])
def test_a_plan_of_epochs_is_a_bound_where_a_step_draws_several_batches(
    tmp_path: Path, bound: int, steps: int | None, words: str
) -> None:
    algorithm = {"name": "dapo", "max_generations": bound}
    run = OnPolicyRun.parse(sections(tmp_path, algorithm=algorithm, trainer__total_steps=steps))
    assert f"# steps: {words} of 2 prompts" in plan(run)


def test_a_plan_reads_as_the_config_and_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "load_model", None)
    val = write_jsonl(tmp_path / "val.jsonl", prompts(3))
    run = OnPolicyRun.parse(sections(tmp_path, data__val=str(val)))
    text = plan(run)
    assert OnPolicyRun.parse(OmegaConf.to_container(OmegaConf.create(text))) == run  # type: ignore[arg-type]
    assert "# train: read 8 rows, kept 8" in text and "# val: read 3 rows, kept 3" in text
    assert not (tmp_path / "run").exists()


def test_a_plan_finds_what_would_stop_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the model has 32"):
        plan(OnPolicyRun.parse(sections(tmp_path, rollout__max_response_tokens=30)))
    with pytest.raises(ConfigError, match="one reward"):
        plan(OnPolicyRun.parse(sections(tmp_path, reward={"timeout_s": 3})))


def test_a_run_prints_its_summary_and_keeps_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import logging

    logging.getLogger("verl").setLevel(logging.INFO)
    assert train_run(OnPolicyRun.parse(sections(tmp_path))) == 0
    assert "mean reward" in capsys.readouterr().out
    log = (tmp_path / "run" / "logs" / "run.log").read_text()
    assert "sampling with SamplingParams" in log
    assert train_run(OnPolicyRun.parse(sections(tmp_path))) == 0
    again = (tmp_path / "run" / "logs" / "run.log").read_text()
    assert again.startswith(log) and "the run is finished, 2 of 2 steps" in again
    assert not [h for h in logging.getLogger("verl").handlers if isinstance(h, logging.FileHandler)]
