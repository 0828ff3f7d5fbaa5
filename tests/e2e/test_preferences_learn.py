"""DPO and KTO raise the margin of answers that they were not trained on: even numbers are preferred to odd ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import SCRATCH
from verl.trainer.preference_trainer import PreferenceTrainer

STEPS = 30


def rows(is_paired: bool, start: int, stop: int) -> list[dict[str, Any]]:
    """To each prompt an even and an odd two-digit answer."""
    made: list[dict[str, Any]] = []
    for i in range(start, stop):
        prompt, even, odd = f"{i // 10}+{i % 10}=", f"{i % 9}{2 * (i % 5)}", f"{i % 9}{2 * (i % 4) + 1}"
        if is_paired:
            made.append({"prompt": prompt, "chosen": even, "rejected": odd})
        else:
            made += [
                {"prompt": prompt, "response": even, "label": True},
                {"prompt": prompt, "response": odd, "label": 0},
            ]
    return made


def validations(folder: Path, algorithm: dict[str, Any], lr: float = 0.003) -> list[dict[str, float]]:
    """Metrics of the held-out rows before the first step and after the last one."""
    is_paired = algorithm["name"] == "dpo"
    trainer = PreferenceTrainer(
        {"scratch": dict(SCRATCH), "tokenizer": "chars:0123456789+="},
        {"train": rows(is_paired, 0, 60), "max_example_tokens": 12},
        val=rows(is_paired, 60, 90),
        algorithm=algorithm,
        actor={"optim": {"lr": lr}},
        trainer={"output_dir": folder / "run", "rows_per_step": 16, "total_steps": STEPS, "device": "cpu"},
        track={"trackers": []},
    )
    trainer.run()
    trainer.close()
    lines = [json.loads(x) for x in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [lines[0], lines[-1]]


@pytest.mark.parametrize("loss", [{"loss": "sigmoid"}, {"loss": "ipo"}, {"label_smoothing": 0.1}], ids=str)
def test_dpo_prefers_what_it_was_told(loss: dict[str, Any], tmp_path: Path) -> None:
    first, last = validations(tmp_path, {"name": "dpo", **loss})
    assert first["validation/accuracy"] == 0 and abs(first["validation/margin"]) < 1e-5
    assert last["validation/accuracy"] > 0.9
    assert last["validation/margin"] > 0.1 and last["validation/loss"] < first["validation/loss"]


def test_kto_prefers_what_it_was_told(tmp_path: Path) -> None:
    first, last = validations(tmp_path, {"name": "kto"})
    assert abs(first["validation/margin"]) < 1e-5
    assert last["validation/margin"] > 0.2 and last["validation/loss"] < first["validation/loss"]
    assert last["validation/chosen_reward"] > last["validation/rejected_reward"]


def test_without_learning_nothing_is_preferred(tmp_path: Path) -> None:
    _, last = validations(tmp_path, {"name": "dpo"}, lr=1e-9)
    assert abs(last["validation/margin"]) < 0.01
