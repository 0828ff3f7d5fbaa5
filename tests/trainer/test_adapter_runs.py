"""Runs that train an adapter: on-policy, alone and on workers, resumed, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_folder, tiny_model, word_tokenizer
from tests.trainer.runs import metrics_of, rollouts_of, sections
from verl.common.errors import CheckpointError, ConfigError, MissingExtra
from verl.models import lora
from verl.trainer.export import export_checkpoint
from verl.trainer.inference import load_sampler
from verl.trainer.ppo_trainer import PPOTrainer

pytest.importorskip("peft")
KL = {"name": "grpo", "kl_coef": 0.1}


def run(folder: Path, steps: int | None = None, **changes: Any) -> list[dict[str, Any]]:
    keys = sections(folder, **{"model__lora": {"rank": 2}, "actor__optim__lr": 0.05, **changes})
    trainer = PPOTrainer(**keys)
    try:
        trainer.run(steps)
    finally:
        trainer.close()
    return metrics_of(folder / "run")


def folder_model(folder: Path) -> dict[str, Any]:
    return {"model": {"path": str(tiny_folder(folder / "start")), "lora": {"rank": 2}}}


@pytest.mark.parametrize("algorithm, temperature", [(KL, 1.0), (KL, 0.5), ({"name": "ppo", "kl_coef": 0.1}, 1.0)])
def test_the_reference_is_the_base_at_every_step(algorithm: dict[str, Any], temperature: float, tmp_path: Path) -> None:
    """KL to it is 0 before the first update and not afterwards; sampler and trainer agree at both, at any
    temperature (H05)."""
    first, second = run(tmp_path, algorithm=algorithm, rollout__temperature=temperature)
    key = "actor/kl" if "actor/kl" in first else "actor/reward_kl"
    assert first[key] == pytest.approx(0.0, abs=1e-6)
    assert second[key] > 1e-3
    assert all(line["actor/rollout_log_prob_diff/max"] < 1e-4 for line in (first, second))
    assert all(line["actor/grad_norm"] > 0 for line in (first, second))


def test_there_is_no_second_copy_of_the_model(tmp_path: Path) -> None:
    trainer = PPOTrainer(**sections(tmp_path, model__lora={"rank": 2}, algorithm=KL))
    try:
        (reference,) = [role for role in trainer.parts.passes if role.name == "reference"]
        assert reference.engine is trainer.parts.roles.actor.engine
    finally:
        trainer.close()


def test_a_checkpoint_holds_adapters_and_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    ppo = {"algorithm": {"name": "ppo", "kl_coef": 0.1}}
    straight = run(tmp_path / "whole", steps=3, **ppo)
    run(tmp_path / "parts", steps=1, **ppo)
    assert run(tmp_path / "parts", steps=3, **ppo) == straight
    checkpoint = tmp_path / "whole" / "run" / "checkpoints" / "step_000003"
    assert rollouts_of(tmp_path / "whole" / "run") == rollouts_of(tmp_path / "parts" / "run")
    actor = load_file(checkpoint / "actor" / "model" / lora.WEIGHTS)
    assert all(".lora_A." in name or ".lora_B." in name for name in actor)
    critic = load_file(checkpoint / "critic" / "model" / "critic.safetensors")
    assert {name for name in critic if ".lora_" not in name} == {"value_head.weight", "value_head.bias"}


@pytest.mark.parametrize("start", ["folder", "scratch", "object"])
def test_export_ships_what_was_trained(start: str, tmp_path: Path) -> None:
    """H13: the exported folder, loaded by plain transformers, gives the logits that the run trained to."""
    keys = sections(tmp_path, model__lora={"rank": 2}, actor__optim__lr=0.05, data__chat="never")
    if start == "folder":
        keys["model"] = {"path": str(tiny_folder(tmp_path / "start")), "lora": {"rank": 2}}
    trainer = PPOTrainer(**keys) if start != "object" else of_object(keys)
    trainer.run()
    module: Any = trainer.parts.roles.module
    trainer.close()
    trained = logits_of(module)
    with lora.without_adapter(module):
        assert float((trained - logits_of(module)).abs().max()) > 1e-2
    exported = export_checkpoint(tmp_path / "run", tmp_path / "exported")
    names = [name for path in exported.glob("*.safetensors") for name in load_file(path)]
    assert names and not [n for n in names if "lora_" in n or "base_layer" in n or "base_model" in n]
    assert not list(exported.glob("adapter_*")) and (exported / "tokenizer.json").exists()
    torch.testing.assert_close(logits_of(AutoModelForCausalLM.from_pretrained(exported)), trained, atol=1e-3, rtol=1e-3)
    assert (tmp_path / "run" / "base").exists() is (start != "folder")
    half = export_checkpoint(tmp_path / "run", tmp_path / "half", "bfloat16")
    assert AutoModelForCausalLM.from_pretrained(half, dtype="auto").dtype == torch.bfloat16


def test_an_adapter_generates_and_is_a_starting_point(tmp_path: Path) -> None:
    """`verl generate` and another run take a checkpoint of adapters: the base with the adapter merged."""
    (tmp_path / "again").mkdir()
    trainer = PPOTrainer(**sections(tmp_path, model__lora={"rank": 2}, actor__optim__lr=0.05))
    trainer.run()
    trainer.close()
    module: Any = trainer.parts.roles.module
    folder = tmp_path / "run" / "checkpoints" / "step_000002" / "actor" / "model"
    sampler = load_sampler(str(folder), device="cpu")
    assert sampler.tokenizer.vocab_size == trainer.parts.tokenizer.vocab_size
    model = {"path": str(folder), "lora": {"rank": 3}}
    second = PPOTrainer(**sections(tmp_path / "again", model=model, actor__optim__lr=0.05))
    second.run()
    second.close()
    after: Any = second.parts.roles.module
    with lora.without_adapter(after):
        torch.testing.assert_close(logits_of(after), logits_of(module), atol=1e-3, rtol=1e-3)
    exported = export_checkpoint(tmp_path / "again" / "run", tmp_path / "exported")  # an adapter on an adapter
    torch.testing.assert_close(
        logits_of(AutoModelForCausalLM.from_pretrained(exported)), logits_of(after), atol=1e-3, rtol=1e-3
    )


@pytest.mark.parametrize("placement", [{"devices": 2}, {"devices": 2, "rollout": 1}])
def test_workers_train_the_same_adapter(placement: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    alone = run(tmp_path / "one", algorithm=KL)
    spread = run(tmp_path / "two", algorithm=KL, placement={"executor": "processes", **placement})
    for a, b in zip(alone, spread, strict=True):
        for key in ("reward/score/mean", "actor/kl", "actor/grad_norm", "actor/entropy"):
            assert b[key] == pytest.approx(a[key], rel=1e-3, abs=1e-6), key
    one, two = (
        load_file(tmp_path / name / "run" / "checkpoints" / "step_000002" / "actor" / "model" / lora.WEIGHTS)
        for name in ("one", "two")
    )
    assert one.keys() == two.keys()
    export_checkpoint(tmp_path / "two" / "run", tmp_path / "exported")


def test_the_policy_learns_through_an_adapter(tmp_path: Path) -> None:
    lines = run(tmp_path, steps=25, trainer__prompts_per_step=4, actor__optim__lr=0.03, model__lora={"rank": 4})
    scores = [line["reward/score/mean"] for line in lines]
    assert sum(scores[-5:]) / 5 > sum(scores[:5]) / 5 + 0.2


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = sections(tmp_path)
    with pytest.raises(ConfigError, match="has an adapter in it"):
        of_object(keys, with_adapter=True)
    run(tmp_path, steps=1)
    with pytest.raises(ConfigError, match=r"model.lora.rank was 2, is 3"):
        run(tmp_path, steps=2, model__lora={"rank": 3})
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"verl\[lora\]"):
        run(tmp_path, steps=2)


def test_an_adapter_without_its_base_isn_t_exported(tmp_path: Path) -> None:
    trainer = PPOTrainer(**sections(tmp_path, model__lora={"rank": 2}))
    trainer.run(1)
    trainer.close()
    (tmp_path / "run" / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="can't be merged"):
        export_checkpoint(tmp_path / "run", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_keys_of_a_reference_do_nothing_beside_an_adapter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = sections(tmp_path, model__lora={"rank": 2}, algorithm=KL, reference={"max_tokens_per_micro_batch": 100})
    PPOTrainer(**keys).close()
    assert "key without effect: reference: with model.lora the reference is the model below" in caplog.text


def of_object(keys: dict[str, Any], with_adapter: bool = False) -> PPOTrainer:
    """A trainer of a module given in Python."""
    module = tiny_model("llama")
    if with_adapter:
        lora.add_adapter(module, lora.LoraConfig(rank=2), base="nowhere", seed=0)
    model = {"path": module, **{key: value for key, value in keys["model"].items() if key == "lora"}}
    rest = {name: section for name, section in keys.items() if name != "model"}
    return PPOTrainer(model=model, tokenizer=word_tokenizer(), **rest)


def logits_of(module: Any) -> torch.Tensor:
    logits: torch.Tensor = module(torch.tensor([[3, 4, 5, 6, 7]])).logits
    return logits.detach()
