"""Whole runs of DPO and KTO: what they need, what they measure, how they stop and go on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny import tiny_model, word_tokenizer
from tests.trainer.runs import SCRATCH, checkpoints_of, metrics_of, write_jsonl
from verl.common.errors import ConfigError, DataError, RunIncomplete, StaleWeights
from verl.models.loading import character_tokenizer
from verl.trainer.launch import plan, train_run
from verl.trainer.offline_sections import PreferenceRun
from verl.trainer.preference_trainer import PreferenceTrainer
from verl.workers.starting_policy import StartingPolicy

PAIRS = [{"prompt": f"{i // 10}+{i % 10}=", "chosen": f"{i % 7}1", "rejected": str(i % 5)} for i in range(12)]
SINGLES = [{"prompt": f"{i}=", "response": str(i % 3) * (1 + i % 2), "label": i % 2 == 0} for i in range(9)]
ROWS: dict[str, list[dict[str, Any]]] = {"dpo": PAIRS, "kto": SINGLES}


def sections(folder: Path, algorithm: str = "dpo", **trainer: Any) -> dict[str, Any]:
    data = {"train": ROWS[algorithm], "max_example_tokens": 12}
    return {
        "model": {"scratch": dict(SCRATCH), "tokenizer": "chars:0123456789+="},
        "data": data,
        "algorithm": algorithm,
        "actor": {"optim": {"lr": 0.01}},
        "trainer": {"output_dir": folder / "run", "rows_per_step": 4, "device": "cpu", **trainer},
        "track": {"trackers": []},
    }


def trainer_of(folder: Path, algorithm: str = "dpo", **trainer: Any) -> PreferenceTrainer:
    return PreferenceTrainer(**sections(folder, algorithm, **trainer))


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_a_stopped_run_goes_on_as_if_it_had_not(algorithm: str, tmp_path: Path) -> None:
    straight = trainer_of(tmp_path / "straight", algorithm, epochs=2)
    assert straight.run().steps == (6 if algorithm == "dpo" else 5)
    straight.close()
    first = trainer_of(tmp_path / "parts", algorithm, epochs=2)
    first.run(2)
    first.close()
    second = trainer_of(tmp_path / "parts", algorithm, epochs=2)
    assert second.steps_done == 2
    second.run()
    second.close()
    assert metrics_of(tmp_path / "parts" / "run") == metrics_of(tmp_path / "straight" / "run")


def test_the_reference_is_kept_with_the_run_and_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = trainer_of(tmp_path, total_steps=4)
    first.run(2)
    first.close()
    computed: list[int] = []
    compute = StartingPolicy._compute
    monkeypatch.setattr(
        StartingPolicy, "_compute", lambda self, answers: computed.append(len(answers)) or compute(self, answers)
    )
    second = trainer_of(tmp_path, total_steps=4)
    second.close()
    assert computed == [1], "one answer, to see that it is the same policy"
    for path in (tmp_path / "run" / "reference").iterdir():
        path.unlink()
    third = trainer_of(tmp_path, total_steps=4)
    third.run()
    third.close()
    assert computed[1:] == [24]
    whole = trainer_of(tmp_path / "whole", total_steps=4)
    whole.run()
    whole.close()
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole" / "run"), "from the start, not as learned"


def test_answers_of_few_steps_are_all_that_the_reference_is_asked(tmp_path: Path) -> None:
    short = trainer_of(tmp_path, total_steps=1)
    kept = load_file(tmp_path / "run" / "reference" / "log_probs.safetensors")
    assert len(kept["lengths"]) == 8
    assert short.run(3).steps == 3, "asked for more before the first update"
    short.close()
    late = trainer_of(tmp_path / "late", total_steps=1)
    late.run(1)
    with pytest.raises(StaleWeights, match="total_steps"):
        late.run(1)
    late.close()


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_the_first_step_is_at_the_reference(algorithm: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, algorithm, total_steps=3)
    metrics = trainer.step()
    assert metrics["actor/loss"] == pytest.approx(0.693147 if algorithm == "dpo" else 0.5, abs=1e-5)
    assert abs(metrics["actor/margin"]) < 1e-5 and metrics.get("actor/accuracy", 0.0) == 0.0
    trainer.step()
    assert trainer.validate() == {} and trainer.step()["actor/loss"] != metrics["actor/loss"]
    trainer.close()


def test_validation_is_of_all_held_out_rows_at_start_and_end(tmp_path: Path) -> None:
    keys = sections(tmp_path, total_steps=3)
    keys["data"] |= {"val": PAIRS[:5], "train": PAIRS[5:]}
    trainer = PreferenceTrainer(**keys)
    trainer.run()
    trainer.close()
    lines = {line["step"]: line for line in metrics_of(tmp_path / "run")}
    assert lines[0]["validation/rows"] == lines[3]["validation/rows"] == 5
    assert lines[0]["validation/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert lines[3]["validation/loss"] < lines[0]["validation/loss"] and "validation/loss" not in lines[1]


def test_validation_of_single_answers_has_its_own_mismatches(tmp_path: Path) -> None:
    keys = sections(tmp_path, "kto", total_steps=2)
    keys["data"] |= {"val": SINGLES[:3], "train": SINGLES[3:]}
    trainer = PreferenceTrainer(**keys)
    assert trainer.run().metrics["validation/rows"] == 3
    trainer.close()


def test_single_rows_of_one_prompt_have_nobody_to_meet(tmp_path: Path) -> None:
    keys = sections(tmp_path, "kto")
    keys["data"]["train"] = [{**row, "prompt": "1="} for row in SINGLES]
    with pytest.raises(DataError, match="same prompt"):
        PreferenceTrainer(**keys)


def test_a_model_given_as_an_object_is_trained_in_place_and_given_back(tmp_path: Path) -> None:
    module = tiny_model("llama")
    before, attention = module.lm_head.weight.clone(), module.config._attn_implementation
    keys = sections(tmp_path, total_steps=1)
    rows = [{"prompt": "hi w6", "chosen": "w7", "rejected": "w8 w9"}]
    trainer = PreferenceTrainer(**{**keys, "model": module, "data": rows, "tokenizer": word_tokenizer()})
    assert module.config._attn_implementation == attention, "between set-up and run it is its owner's"
    trainer.run()
    trainer.close()
    assert module.config._attn_implementation == attention
    assert not torch.equal(before, module.lm_head.weight)


def test_a_start_that_fails_gives_the_model_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    own = model.config._attn_implementation

    def fail(self: StartingPolicy, answers: Any) -> None:
        assert model.config._attn_implementation == "verl"
        raise OSError("the disk is full")

    monkeypatch.setattr(StartingPolicy, "prepare", fail)
    with pytest.raises(OSError, match="full"):
        PreferenceTrainer(**{**sections(tmp_path), "model": model, "tokenizer": character_tokenizer("0123456789+=")})
    assert model.config._attn_implementation == own


def test_an_object_in_another_type_keeps_its_rotary_frequencies(tmp_path: Path) -> None:
    """Rounded to bfloat16 they turn a token 8000 places away by another angle: it is another model."""
    module = tiny_model("llama")
    angles = module.model.rotary_emb.inv_freq.clone()
    model = {"path": module, "amp_dtype": "bfloat16"}
    keys = {**sections(tmp_path, total_steps=1), "model": model, "data": [PAIRS[0]], "tokenizer": word_tokenizer()}
    PreferenceTrainer(**keys).close()
    assert module.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(module.model.rotary_emb.inv_freq, angles)


def test_the_data_end(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, epochs=1)
    trainer.run()
    with pytest.raises(RunIncomplete, match=r"trainer\.epochs"):
        trainer.step()
    trainer.close()


def test_from_a_config_file_with_the_plan_and_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = sections(tmp_path, save_every=2, total_steps=3)
    keys["data"]["train"] = str(write_jsonl(tmp_path / "pairs.jsonl", PAIRS))
    keys["trainer"]["output_dir"] = str(tmp_path / "run")
    config = PreferenceRun.parse(keys)
    assert "# steps: 3 of 4 examples" in plan(config) and not (tmp_path / "run").exists()
    assert train_run(config) == 0
    assert checkpoints_of(tmp_path / "run") == ["step_000002", "step_000003"]
    assert "actor/margin" in capsys.readouterr().out


def test_what_an_algorithm_reads_must_be_there(tmp_path: Path) -> None:
    keys = sections(tmp_path)
    keys["data"]["train"] = SINGLES
    with pytest.raises(DataError, match=r"data\.chosen_key"):
        PreferenceTrainer(**keys)


def test_an_algorithm_of_another_family_is_sent_to_its_trainer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm.name='grpo' is of the family 'on_policy'"):
        PreferenceTrainer(**{**sections(tmp_path), "algorithm": "grpo"})


def test_mini_batches_keep_pairs_whole(tmp_path: Path) -> None:
    keys = sections(tmp_path, total_steps=2)
    keys["actor"] |= {"mini_batches_per_epoch": 3, "epochs_per_step": 2, "max_tokens_per_micro_batch": 24}
    trainer = PreferenceTrainer(**keys)
    assert trainer.run().metrics["actor/skipped_updates/sum"] == 0
    trainer.close()


def test_an_equal_pair_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = sections(tmp_path, total_steps=1)
    keys["data"]["train"] = [{"prompt": "1=", "chosen": "23", "rejected": "23"}]
    with caplog.at_level(logging.WARNING):
        trainer = PreferenceTrainer(**keys)
    metrics = trainer.step()
    trainer.close()
    assert "teach nothing" in caplog.text
    assert metrics["actor/loss"] == pytest.approx(0.693147, abs=1e-6)
    assert metrics["actor/accuracy"] == 0 and metrics["actor/grad_norm"] < 1e-6
