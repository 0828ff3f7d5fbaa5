"""The example of docs/rlhf.md, whole: SFT, then a reward model on pairs, then PPO on the reward model's scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl.config import load_config
from verl.trainer.launch import train_run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def train(stage: str) -> list[dict[str, Any]]:
    """The example's run in this folder; its metrics."""
    config = load_config(EXAMPLES / f"rlhf_{stage}.yaml", ["trainer.device=cpu", "track.trackers=[]"])
    assert train_run(config) == 0
    lines = (config.trainer.output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def right(step: int) -> float:
    """Share of a step's responses that are the right answer, which no stage reads."""
    path = Path("runs/rlhf_ppo/rollouts") / f"step_{step:06d}.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return sum(row["response"] == row["ground_truth"] for row in rows) / len(rows)


@pytest.mark.slow
def test_from_demonstrations_to_ppo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sft = train("sft")
    assert sft[0]["actor/loss"] > 2 and sft[-1]["actor/loss"] < 0.9, "ln 13 at first; ln 3 of two tokens at best"
    judged = train("reward_model")
    assert judged[0]["validation/accuracy"] == 0 and judged[0]["validation/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert judged[-1]["validation/accuracy"] > 0.9, "on pairs that it hasn't seen"
    ppo = train("ppo")
    assert ppo[-1]["reward/score/mean"] > ppo[0]["reward/score/mean"] + 1
    assert right(1) < 0.45 and right(30) > 0.75
