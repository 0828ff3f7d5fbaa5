"""Whole SFT runs: what is learned, measured and saved, alone and on workers; how they stop and go on."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import tiny_model, word_tokenizer
from tests.trainer.runs import SCRATCH, checkpoints_of, metrics_of, write_jsonl
from verl.common.errors import ConfigError, DataError
from verl.config import load_config
from verl.trainer.launch import plan, train_run
from verl.trainer.sft_sections import SFTRun
from verl.trainer.sft_trainer import SFTTrainer

ROWS = [{"prompt": f"{i // 10}+{i % 10}=", "response": f"{i % 7}" * (1 + i % 3)} for i in range(12)]


def sections(folder: Path, **trainer: Any) -> dict[str, Any]:
    return {
        "model": {"scratch": dict(SCRATCH), "tokenizer": "chars:0123456789+="},
        "data": {"train": ROWS, "max_example_tokens": 16},
        "actor": {"optim": {"lr": 0.01}},
        "trainer": {"output_dir": folder / "run", "rows_per_step": 4, "device": "cpu", **trainer},
        "track": {"trackers": []},
    }


def run(folder: Path, steps: int | None = None, **trainer: Any) -> SFTTrainer:
    made = SFTTrainer(**sections(folder, **trainer))
    made.run(steps)
    made.close()
    return made


def test_a_stopped_run_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    assert run(tmp_path / "straight", epochs=2).steps_done == 6
    run(tmp_path / "parts", 2, epochs=2)
    assert run(tmp_path / "parts", epochs=2).steps_done == 6
    lines = metrics_of(tmp_path / "straight" / "run")
    assert metrics_of(tmp_path / "parts" / "run") == lines
    assert lines[-1]["actor/loss"] < lines[0]["actor/loss"]
    assert sum(line["actor/learned_tokens/sum"] for line in lines) == 2 * sum(len(r["response"]) + 1 for r in ROWS)


def test_the_loss_is_transformers_own_of_what_it_saved(tmp_path: Path) -> None:
    """The validation of the last step, computed anew from the checkpoint by plain transformers."""
    keys = sections(tmp_path, total_steps=2)
    keys["data"] |= {"val": ROWS[:3]}
    trainer = SFTTrainer(**keys)
    measured = trainer.run().metrics["validation/loss"]
    trainer.close()
    folder = tmp_path / "run" / "checkpoints" / "step_000002" / "actor" / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for row in ROWS[:3]:
        prompt, answer = (tokenizer(row[key])["input_ids"] for key in ("prompt", "response"))
        ids = torch.tensor([[*prompt, *answer, tokenizer.eos_token_id]])
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=labels).loss) * (len(answer) + 1)
        count += len(answer) + 1
    assert measured == pytest.approx(total / count, abs=1e-5)


def test_conversations_are_learned_turn_by_turn(tmp_path: Path) -> None:
    """Uniform over 64 words: ln 64 a token, on the five tokens of two assistant turns."""
    module = tiny_model("llama")
    with torch.no_grad():
        module.lm_head.weight.zero_()
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "w20 w21"},
        {"role": "user", "content": "w9"},
        {"role": "assistant", "content": "w22"},
    ]
    trainer = SFTTrainer(
        module,
        {"train": [{"messages": talk}], "prompt_key": "messages", "response_key": None},
        tokenizer=word_tokenizer(),
        trainer={"output_dir": tmp_path / "run", "rows_per_step": 1, "total_steps": 1, "device": "cpu"},
        track={"trackers": []},
    )
    metrics = trainer.step()
    trainer.close()
    assert metrics["actor/loss"] == pytest.approx(math.log(64), abs=1e-5)
    assert metrics["actor/learned_tokens/sum"] == 5


def yaml_of(folder: Path, **changes: Any) -> Path:
    keys = sections(folder, total_steps=2)
    keys["data"]["train"] = str(write_jsonl(folder / "train.jsonl", ROWS))
    keys["trainer"]["output_dir"] = str(folder / "run")
    path = folder / "sft.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create({**keys, "algorithm": "sft", **changes})), encoding="utf-8")
    return path


def test_the_command_line_picks_the_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(yaml_of(tmp_path))
    assert isinstance(config, SFTRun)
    assert "# steps: 2 of 4 examples" in plan(config) and not (tmp_path / "run").exists()
    assert train_run(config) == 0
    assert "loss" in capsys.readouterr().out
    assert checkpoints_of(tmp_path / "run") == ["step_000002"]


def test_two_workers_make_the_steps_of_one_process(tmp_path: Path) -> None:
    run(tmp_path / "one", total_steps=2)
    spread = yaml_of(tmp_path, placement={"executor": "processes", "devices": 2})
    assert train_run(load_config(spread)) == 0
    for here, there in zip(metrics_of(tmp_path / "one" / "run"), metrics_of(tmp_path / "run"), strict=True):
        for key in ("actor/loss", "actor/grad_norm", "actor/learned_tokens/sum"):
            assert there[key] == pytest.approx(here[key], rel=1e-4)


def test_what_can_not_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = sections(tmp_path)
    with pytest.raises(ConfigError, match=r"family 'on_policy'.*'supervised'"):
        SFTTrainer(**keys, algorithm="grpo")
    with pytest.raises(ConfigError, match=r"max_example_tokens = 20000 tokens.*max_tokens_per_micro_batch"):
        SFTTrainer(**{**keys, "data": {**keys["data"], "max_example_tokens": 20000}})
    with pytest.raises(ConfigError, match=r"come to 36 tokens; the model has 32 positions"):
        long = [{"prompt": "1" * 30, "response": "2" * 5}]
        SFTTrainer(**{**keys, "data": {"train": long}})
    with pytest.raises(DataError, match="no row is left"):
        SFTTrainer(**{**keys, "data": {"train": ROWS, "max_example_tokens": 3}})
    with caplog.at_level(logging.WARNING):
        SFTRun.parse({**yaml_keys(tmp_path), "data": {"train": "x.jsonl", "max_prompt_tokens": 3}})
    assert "data.max_prompt_tokens: the limit is that of whole examples" in caplog.text


def yaml_keys(folder: Path) -> dict[str, Any]:
    return {**sections(folder), "algorithm": "sft"}
