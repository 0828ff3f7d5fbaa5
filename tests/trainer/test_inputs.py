from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.tiny import VOCAB, tiny_model, word_tokenizer
from tests.trainer.runs import metrics_of, sections
from verl.common.errors import ConfigError
from verl.data.config import DataConfig
from verl.data.prompts import load_prompts
from verl.trainer.inputs import check_lengths, sections_of
from verl.trainer.launch import train_run
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.sections import OnPolicyRun, TrainerConfig


@pytest.mark.parametrize("where", ["train", "val"])
def test_ids_beyond_the_models_vocabulary_are_found_before_it_is_loaded(tmp_path: Path, where: str) -> None:
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["new"])
    fine, bad = (load_prompts([{"prompt": p, "ground_truth": ""}], DataConfig(), tokenizer) for p in ("hi", "new"))
    hf_config, config = AutoConfig.for_model("llama", vocab_size=VOCAB), OnPolicyRun.parse(sections(tmp_path))
    check_lengths(hf_config, config, fine, fine)
    with pytest.raises(ConfigError, match=rf"row 0 of data\.{where} .* token id 64, and the model knows 64 tokens"):
        check_lengths(hf_config, config, *((bad, fine) if where == "train" else (fine, bad)))


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), 5, None])
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(ConfigError, match=rf"transformers module .*, got {type(model).__name__}"):
        sections_of(model=model, data=[], reward="exact", tokenizer=word_tokenizer(), val=None, algorithm="grpo")


@pytest.mark.parametrize("steps", [0, -1, 1.5, "3"])
def test_steps_that_are_no_number_of_steps(tmp_path: Path, steps: Any) -> None:
    with PPOTrainerOf(tmp_path) as trainer, pytest.raises(ConfigError, match="num_steps must be a whole number"):
        trainer.run(steps)


class PPOTrainerOf:  # used as a context manager
    """A trainer on a module and a list, closed at the end."""

    def __init__(self, folder: Path) -> None:
        rows = [{"prompt": "hi", "ground_truth": "w6"}]
        run = {"output_dir": folder / "run", "prompts_per_step": 1, "group_size": 2}
        shape = {"max_response_tokens": 2}
        self.trainer = PPOTrainer(
            tiny_model("llama"), rows, "exact", tokenizer=word_tokenizer(), rollout=shape, trainer=run
        )

    def __enter__(self) -> PPOTrainer:
        return self.trainer

    def __exit__(self, *_: object) -> None:
        self.trainer.close()


def test_a_run_stays_in_its_folder_when_the_working_folder_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward in this process goes elsewhere and doesn't come back."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "reward.py").write_text(
        f"import os\ndef score(response):\n    os.chdir({str(tmp_path / 'elsewhere')!r})\n    return 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    reward = {"function": "reward.py:score", "workers": 0}
    config = OnPolicyRun.parse(sections(tmp_path, reward=reward, trainer__output_dir="here"))
    assert train_run(config) == 0
    assert os.getcwd() == str(tmp_path / "elsewhere") and not os.listdir()
    assert [row["step"] for row in metrics_of(tmp_path / "here")] == [1, 2]
    assert {"config.yaml", "checkpoints", "rollouts", "logs"} <= set(os.listdir(tmp_path / "here"))


def test_the_home_folder_by_its_sign(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert TrainerConfig(output_dir=Path("~/runs/a")).output_dir == tmp_path / "runs" / "a"


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "mps", "CPU", ""])
def test_words_that_are_no_device_are_refused_with_the_config(device: str) -> None:
    assert TrainerConfig(device="cuda:1").device == "cuda:1"
    with pytest.raises(ValueError, match="is no device: auto, cpu, cuda or cuda:N"):
        TrainerConfig(device=device)
