"""Every config that ships loads and dry-runs; the quickstart trains, and goes on where it stopped."""

from __future__ import annotations

import json
import string
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.config_keys import reference
from tests.tiny import tiny_folder, tiny_model
from tests.trainer.runs import environment, metrics_of
from verl.algorithms import ALGORITHMS
from verl.cli import app
from verl.common.errors import VerlError
from verl.config import load_config, recipes
from verl.engines.saved_model import save_model
from verl.models.causal_lm import CausalLM
from verl.models.loading import character_tokenizer
from verl.models.networks import ScoreNetwork
from verl.trainer.base_sections import Run
from verl.trainer.launch import train_run
from verl.trainer.sections import TrainerConfig

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
CONFIGS = [*EXAMPLES, *sorted((ROOT / "verl" / "recipes").glob("*.yaml"))]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
"""The data set, where it lies beside the checkout."""
ROWS = 64
CHARACTERS = string.printable + "".join(map(chr, range(0xA0, 0x100)))
CHARACTERS += "\u0410\u200b\u2013\u2014\u2018\u2019\u201c\u201d\u2028\u20ac\u2212\u221a"
"""All that the data set has, and more."""


def config_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the positions of the one that the examples name, and a tokenizer that tells texts apart."""
    folder = tiny_folder(tmp_path_factory.mktemp("model"))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    character_tokenizer(CHARACTERS).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"max_position_embeddings": 8192, "vocab_size": 256}  # a dry run loads no weights
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def gsm8k_rows(folder: Path, split: str) -> Path:
    """The data set's file, or a few rows of the same columns."""
    if (GSM8K / f"{split}.jsonl").is_file():
        return GSM8K / f"{split}.jsonl"
    path = folder / f"{split}.jsonl"
    first = 0 if split == "train" else 1000
    rows = [
        {"question": f"What is {first + i} + 1?", "answer": f"{first + i} + 1 = {first + i + 1}\n#### {first + i + 1}"}
        for i in range(ROWS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def solution_rows(folder: Path) -> Path:
    """The data set's file of judged solutions, or a few rows of the same columns."""
    if (GSM8K / "example_model_solutions.jsonl").is_file():
        return GSM8K / "example_model_solutions.jsonl"
    path = folder / "solutions.jsonl"
    models = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
    rows = [
        {"question": f"What is {i} + 1?"}
        | {model: {"is_correct": n == i % 4, "solution": f"{i + n}\nA: {i + n}"} for n, model in enumerate(models)}
        for i in range(ROWS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def local(path: Path, model: Path, folder: Path) -> list[str]:
    """Words that put a tiny model and local data in the place of what a config would download."""
    text = path.read_text(encoding="utf-8")
    words = [f"trainer.output_dir={folder / 'run'}", "trainer.device=cpu"]
    if "reward:\n  model:" in text:
        words.append(f"reward.model={reward_folder(folder)}")
    if "gym:" in text:
        pytest.importorskip("reasoning_gym")
    if "scratch:" not in text:
        words += [f"model.path={model}", f"data.max_train_rows={ROWS}", "data.max_val_rows=8"]
    if "example_model_solutions" in text:
        words += [f"data.{key}={solution_rows(folder)}" for key in ("train", "val")]
    elif "gsm8k" in text:
        words += [f"data.{key}={gsm8k_rows(folder, split)}" for key, split in (("train", "train"), ("val", "test"))]
    return words


def reward_folder(folder: Path) -> Path:
    """A reward model's folder as far as a dry run looks into it."""
    network = ScoreNetwork(CausalLM(tiny_model("llama")))
    save_model(folder / "judge", network.module)
    return folder / "judge"


def dry_run(*words: str) -> str:
    result = CliRunner().invoke(app, ["train", *words, "--dry-run"])
    if result.exception is not None:
        raise result.exception
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize("path", CONFIGS, ids=config_id)
def test_config_dry_runs(path: Path, model: Path, tmp_path: Path) -> None:
    output = dry_run(str(path), *local(path, model, tmp_path))
    config = load_config(path)
    rows = "prompts" if isinstance(config.trainer, TrainerConfig) else "examples"
    assert f"# steps: {config.trainer.total_steps} of {config.trainer.rows_per_batch} {rows}" in output
    assert not (tmp_path / "run").exists(), "a dry run writes nothing"
    (tmp_path / "plan.yaml").write_text(output, encoding="utf-8")
    again = load_config(tmp_path / "plan.yaml")
    assert again == load_config(path, local(path, model, tmp_path)), "the plan is the effective config"


@pytest.mark.parametrize("path", CONFIGS, ids=config_id)
def test_every_key_of_a_config_has_an_effect(path: Path) -> None:
    config = load_config(path)
    assert config.ineffective_keys() == []
    assert isinstance(config, Run)


@pytest.mark.parametrize("path", CONFIGS, ids=config_id)
def test_config_says_what_it_is_for(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("word", ["actor.optim.leraning_rate=1e-5", "trainer.group_size=1", "actor.optim.lr=on"])
@pytest.mark.parametrize("path", EXAMPLES, ids=config_id)
def test_a_wrong_word_over_an_example_is_refused(path: Path, word: str, model: Path, tmp_path: Path) -> None:
    algorithm = ALGORITHMS.load(load_config(path).algorithm.name)
    if word == "trainer.group_size=1" and algorithm.family == "on_policy" and algorithm.min_group_size == 1:
        pytest.skip("it compares nothing within a group")
    with pytest.raises(VerlError, match=word.partition("=")[0].rpartition(".")[2]):
        dry_run(str(path), *local(path, model, tmp_path), word)


def test_the_examples_asked_for_are_there() -> None:
    assert {"quickstart", "gsm8k_grpo", "gsm8k_ppo", "arithmetic_grpo"} <= {path.stem for path in EXAMPLES}
    assert "quickstart" in recipes()
    assert load_config("quickstart", ["trainer.output_dir=r"]) == load_config(
        ROOT / "examples" / "quickstart.yaml", ["trainer.output_dir=r"]
    )


def run_quickstart(folder: Path, steps: int) -> list[dict[str, float]]:
    words = [f"trainer.total_steps={steps}", f"trainer.output_dir={folder}", "trainer.device=cpu", "track.trackers=[]"]
    assert train_run(load_config("quickstart", words)) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_quickstart_trains_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run_quickstart(tmp_path / "run", 2)
    assert [row["step"] for row in first] == [1, 2]
    assert all(row["actor/grad_norm"] > 0 and row["actor/skipped_updates/sum"] == 0 for row in first)
    whole = run_quickstart(tmp_path / "run", 4)
    assert [row["step"] for row in whole] == [1, 2, 3, 4] and whole[:2] == first
    assert "reward/score/mean" in capsys.readouterr().out, "the report"
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {
        "config.yaml", "metrics.jsonl", "rollouts", "checkpoints", "logs"
    }  # fmt: skip


LAYOUTS = """
actor:
  model_config:
    hybrid_engine:
      enable: true
      training_sharding:
        pipeline_parallel_size: 2
        data_parallel_size: 1
"""


def test_the_script_trains_a_pipeline_under_torchrun(tmp_path: Path) -> None:
    """As users start it, with the 3D-HybridEngine's keys in the file."""
    text = (ROOT / "examples" / "quickstart.yaml").read_text(encoding="utf-8")
    path = tmp_path / "config.yaml"
    text = text.replace("${here:}/quickstart.jsonl", str(ROOT / "verl" / "recipes" / "quickstart.jsonl"))
    path.write_text(text.replace("\nactor:\n", LAYOUTS), encoding="utf-8")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    words = ["trainer.total_steps=1", f"trainer.output_dir={tmp_path / 'run'}", "trainer.device=cpu"]
    script = ROOT / "examples" / "train_ppo.py"
    done = subprocess.run(
        [*launch, script, "--config", path, *words], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (row,) = metrics_of(tmp_path / "run")
    one = run_quickstart(tmp_path / "one", 1)[0]
    for key in ("actor/grad_norm", "actor/entropy", "reward/score/mean"):
        assert row[key] == pytest.approx(one[key], rel=1e-4)
    saved = (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    assert "pipeline_parallel_size: 2" in saved and "devices: 2" in saved and "model_config" not in saved


def test_every_key_of_the_saved_config_is_documented(tmp_path: Path) -> None:
    config = load_config("quickstart", [f"trainer.output_dir={tmp_path}"])
    free = ("model.scratch.",)
    saved = [key for key in flat(config.model_dump(mode="json")) if not key.startswith(free)]
    assert [key for key in saved if key not in reference().all_keys()] == []


def flat(values: dict[str, object], prefix: str = "") -> list[str]:
    found = []
    for name, value in values.items():
        found += flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [prefix + name]
    return found
