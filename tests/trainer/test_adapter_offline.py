"""Adapters in the offline runs: preference, SFT, reward models, and the chain from one to the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.trainer.runs import metrics_of, sections, write_jsonl
from verl.models import lora
from verl.trainer.export import export_checkpoint
from verl.trainer.families import run_class, trainer_class
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.reward_model import RewardModel

pytest.importorskip("peft")
PROMPTS = [f"{i}+{j}=" for i in range(3) for j in range(2)]
PAIRS = [{"prompt": prompt, "chosen": str(i), "rejected": "99"} for i, prompt in enumerate(PROMPTS)]
UNPAIRED = [{"prompt": p, "response": str(i), "label": i % 2 == 0} for i, p in enumerate(PROMPTS)]
ANSWERED = [{"prompt": prompt, "response": str(i)} for i, prompt in enumerate(PROMPTS)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "dpo": PAIRS, "kto": UNPAIRED, "sft": ANSWERED, "bradley_terry": PAIRS,
}  # fmt: skip


def run(folder: Path, algorithm: str, steps: int = 3, model: dict[str, Any] | None = None) -> Any:
    """A closed trainer that has made ``steps`` steps."""
    folder.mkdir(exist_ok=True)
    plain = sections(folder)
    rows = ROWS[algorithm]
    keys: dict[str, Any] = {
        "model": {**plain["model"], **(model or {}), "lora": {"rank": 2}},
        "data": {"train": str(folder / "rows.jsonl")},
        "algorithm": {"name": algorithm},
        "actor": {"optim": {"lr": 0.05}},
        "trainer": {
            "output_dir": str(folder / "run"), "rows_per_step": len(rows), "total_steps": steps, "device": "cpu",
        },
        "track": {"trackers": []},
    }  # fmt: skip
    if model is not None:
        keys["model"].pop("scratch")
        keys["model"].pop("tokenizer")
    write_jsonl(folder / "rows.jsonl", rows)
    config = run_class(algorithm).parse(keys)
    trainer = trainer_class(config).from_config(config)
    try:
        trainer.run()
    finally:
        trainer.close()
    return trainer


@pytest.mark.parametrize("algorithm", sorted(ROWS))
def test_the_adapter_learns_alone_and_a_resumed_run_is_the_same(algorithm: str, tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", algorithm)
    run(tmp_path / "parts", algorithm, steps=1)
    run(tmp_path / "parts", algorithm)
    lines = metrics_of(tmp_path / "straight" / "run")
    assert metrics_of(tmp_path / "parts" / "run") == lines
    role = straight.parts.roles.actor
    saved = load_file(
        tmp_path / "straight" / "run" / "checkpoints" / "step_000003" / role.name / "model" / lora.WEIGHTS
    )
    assert {name for name in saved if ".lora_" not in name} <= {"base_model.model.score.weight"}
    assert lines[-1][f"{role.name}/grad_norm"] > 0
    losses = [key for key in lines[0] if key.endswith("loss")]
    assert losses and all(lines[-1][key] < lines[0][key] for key in losses)


def test_dpo_starts_at_the_reference(tmp_path: Path) -> None:
    """ln 2 at the first step, below it later: the reference is the base, at every step."""
    run(tmp_path / "dpo", "dpo")
    first, *_, last = metrics_of(tmp_path / "dpo" / "run")
    losses = [key for key in first if key.endswith("loss")]
    assert [first[key] for key in losses] == [pytest.approx(0.693147, abs=1e-5)] * len(losses) and losses
    assert all(last[key] < 0.6 for key in losses)


def test_sft_then_a_reward_model_then_ppo_on_adapters(tmp_path: Path) -> None:
    run(tmp_path / "sft", "sft")
    policy = tmp_path / "sft" / "run" / "checkpoints" / "step_000003" / "actor" / "model"
    trained = run(tmp_path / "rm", "bradley_terry", model={"path": str(policy)})
    judge = tmp_path / "rm" / "run" / "checkpoints" / "step_000003" / "reward_model" / "model"
    module: Any = trained.parts.roles.actor.engine.network
    expected = score_of(module)
    exported = export_checkpoint(tmp_path / "rm" / "run", tmp_path / "exported", role="reward_model")
    plain = AutoModelForSequenceClassification.from_pretrained(exported)
    ids = torch.tensor([[3, 4, 5]])
    assert float(plain(ids).logits[0, 0].detach()) == pytest.approx(expected, abs=1e-4)
    assert RewardModel(judge, device="cpu").score([[3, 4, 5]])[0] == pytest.approx(expected, abs=1e-4)
    ppo = sections(tmp_path / "sft", model={"path": str(policy), "lora": {"rank": 2}}, algorithm={"name": "ppo"})
    ppo["reward"] = {"model": str(judge)}
    ppo["trainer"]["output_dir"] = str(tmp_path / "ppo")
    trainer = PPOTrainer(**ppo)
    trainer.run()
    trainer.close()
    lines = metrics_of(tmp_path / "ppo")
    assert len(lines) == 2 and all(line["actor/grad_norm"] > 0 for line in lines)


def score_of(network: Any) -> float:
    """The score of the last of three tokens, by the classifier's own forward."""
    network.lm.backbone.set_attn_implementation("eager")
    hidden = network.lm.backbone(input_ids=torch.tensor([[3, 4, 5]])).last_hidden_state
    return float(network.module.score(hidden)[0, -1, 0].detach())
