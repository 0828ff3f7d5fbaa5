from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import sections
from verl.common.errors import ConfigError
from verl.trainer.sections import OnPolicyRun, TrainerConfig, ValidationConfig


def run(folder: Path, **changes: Any) -> OnPolicyRun:
    return OnPolicyRun.parse(sections(folder, **changes))


def test_the_smallest_run_has_defaults_for_the_rest() -> None:
    made = OnPolicyRun.parse(
        {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"name": "exact"}, "algorithm": "grpo"}
    )
    assert made.rollout.name == "native" and made.trainer.group_size == 8 and made.trainer.resume == "auto"
    assert made.ineffective_keys() == []


def test_default_output_folders_differ() -> None:
    """Two runs that are started at once don't write into one folder."""
    folders = {TrainerConfig().output_dir for _ in range(50)}
    assert len(folders) == 50 and all(folder.parent == Path("runs") for folder in folders)


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        (TrainerConfig, {"group_size": 0}),
        (TrainerConfig, {"prompts_per_step": 0}),
        (TrainerConfig, {"total_steps": 0}),
        (TrainerConfig, {"epochs": 0}),
        (TrainerConfig, {"seed": -1}),
        (TrainerConfig, {"keep_checkpoints": 0}),
        (TrainerConfig, {"save_every": 0}),
        (TrainerConfig, {"save_rollouts_every": 0}),
        (TrainerConfig, {"resume": True}),
        (ValidationConfig, {"every": 0}),
        (ValidationConfig, {"temperature": -0.1}),
        (ValidationConfig, {"samples_per_prompt": 0}),
    ],
)
def test_sizes_of_nothing(section: Any, keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(keys))):
        section.parse(keys)


@pytest.mark.parametrize("algorithm", ["grpo", {"name": "grpo"}, {"name": "ppo", "gamma": 0.9}])
def test_yaml_of_a_run_reads_back(tmp_path: Path, algorithm: Any) -> None:
    from omegaconf import OmegaConf

    made = run(tmp_path, algorithm=algorithm, rollout__block_size=4, actor__optim__max_grad_norm=None)
    again = OnPolicyRun.parse(OmegaConf.to_container(OmegaConf.create(made.as_yaml())))  # type: ignore[arg-type]
    assert again == made and again.ineffective_keys() == []


def test_a_saved_config_names_idle_keys_that_were_changed(tmp_path: Path) -> None:
    made = run(tmp_path, critic__optim__lr=0.5)
    saved = OnPolicyRun.parse(made.model_dump(mode="json"))
    assert [line for line in saved.ineffective_keys() if "critic:" in line] and len(saved.ineffective_keys()) == 1


def test_an_idle_key_at_its_default_is_idle_all_the_same(tmp_path: Path) -> None:
    assert any("critic" in line for line in run(tmp_path, critic={"optim": {"lr": 1e-6}}).ineffective_keys())


def test_conflicts_come_all_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, trainer__group_size=1, actor__max_tokens_per_micro_batch=5, actor__mini_batches_per_epoch=3)
    text = str(caught.value)
    assert "trainer.group_size=1" in text
    assert "data.max_prompt_tokens + rollout.max_response_tokens = 12" in text and "micro_batch=5" in text
    assert "actor.mini_batches_per_epoch=3 is more than the 2 responses" in text


@pytest.mark.parametrize("role", ["critic", "reference"])
def test_budgets_of_the_roles_that_run(tmp_path: Path, role: str) -> None:
    algorithm = {"critic": "ppo", "reference": {"name": "grpo", "kl_coef": 0.1}}[role]
    with pytest.raises(ConfigError, match=rf"{role}\.max_tokens_per_micro_batch=11"):
        run(tmp_path, algorithm=algorithm, **{f"{role}__max_tokens_per_micro_batch": 11})
    run(tmp_path, algorithm="grpo", **{f"{role}__max_tokens_per_micro_batch": 11})


def test_a_group_of_one_is_right_for_ppo(tmp_path: Path) -> None:
    assert run(tmp_path, algorithm="ppo", trainer__group_size=1).trainer.group_size == 1


def test_a_warm_up_that_leaves_no_step_to_the_policy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer.total_steps=3: lower algorithm.critic_warmup_steps"):
        run(tmp_path, algorithm={"name": "ppo", "critic_warmup_steps": 3}, trainer__total_steps=3)
