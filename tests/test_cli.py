from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import verl
from tests.processes import files_of_at_most, is_gone
from tests.rollout.engines import greedy
from tests.tiny import tiny_folder, tiny_model, word_tokenizer
from tests.trainer.runs import REWARDS, checkpoints_of, config_file, metrics_of, prompts, write_jsonl
from tests.trainer.runs import verl as verl_process
from verl.cli import main
from verl.models.loading import character_tokenizer
from verl.workers import recipe

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """``verl`` in this process: exit code, standard output, standard error."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["verl", *map(str, words)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    level = logging.getLogger("verl").level
    yield run
    logging.getLogger("verl").setLevel(level)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model is a failure of the test."""

    def load(*_: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(recipe, "load_model", load)


def refused(command: Command, *words: object) -> str:
    code, _, errors = command(*words)
    assert code == 1 and errors.startswith("error: ") and "Traceback" not in errors, (code, errors)
    return errors


def test_a_run_from_the_shell(tmp_path: Path) -> None:
    """In a process of its own: nothing but the config is needed, and the summary comes at the end."""
    done = verl_process("train", str(config_file(tmp_path)), "trainer.total_steps=1")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "mean reward" in done.stdout
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1]
    assert (tmp_path / "run" / "logs" / "run.log").exists() and (tmp_path / "run" / "config.yaml").exists()


def test_a_wrong_key_from_the_shell(tmp_path: Path) -> None:
    done = verl_process("train", str(config_file(tmp_path)), "actor.optim.leraning_rate=1e-5")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "actor.optim" in done.stderr and "leraning_rate" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("word", ["--version", "--help", "-h"])
def test_version_and_help(command: Command, word: str) -> None:
    code, out, _ = command(word)
    assert code == 0 and (verl.__version__ in out if word == "--version" else "train" in out)


def test_a_warning_of_another_library_is_printed_once() -> None:
    program = (
        "import logging, huggingface_hub; from verl.cli import set_up_logging; set_up_logging(); "
        "logging.getLogger('huggingface_hub.utils').warning('again in 2 s')"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stderr.count("again in 2 s") == 1


def test_unknown_words(command: Command) -> None:
    code, _, errors = command("trian")
    assert code == 2 and "trian" in errors


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["actor.optim.lr=abc"], ["actor.optim.lr", "'abc'"]),
        (["actor.optim.lr=on"], ["actor.optim.lr", "True"]),
        (["actor.optim.lraet=1"], ["actor.optim", "'lraet'"]),
        (["trainer.lr=1"], ["trainer", "known as actor.optim.lr"]),
        (["trainer.seed=1", "trainer.seed=1"], ["'trainer.seed' is given twice"]),
        (["trainer.group_size=1"], ["trainer.group_size=1", "at least 2"]),
        (["data.train=/no/such.jsonl"], ["data.train", "/no/such.jsonl"]),
        (["data.val=/no/such.jsonl"], ["data.val", "/no/such.jsonl"]),
        (["data.prompt_key=promt"], ["data.prompt_key", "'promt'", "did you mean 'prompt'"]),
        (["data.max_prompt_tokens=1"], ["data.max_prompt_tokens = 1", "all 8 rows"]),
        (["data.max_prompt_tokens=3", "data.overlong_prompts=error"], ["8 of 8 rows", "data.max_prompt_tokens"]),
        (["data.system_prompt=hello"], ["data.system_prompt needs a chat template"]),
        (["rollout.max_response_tokens=30"],
         ["rollout.max_response_tokens=30", "data.max_prompt_tokens", "the model has 32"]),
        (["reward.function=/no/file.py:f"], ["reward.function", "/no/file.py"]),
        (["reward.function=no_such_module_xyz:f", "reward.workers=1"], ["can't be loaded", "no_such_module_xyz"]),
        (["reward.function=no_such_module_xyz:f"], ["can't be loaded", "no_such_module_xyz"]),
        ([f"reward.function={REWARDS}:nothing"], ["has no 'nothing'"]),
        (["reward.kwargs={bonus: 1}"], ["bonus"]),
        (["trainer.device=cuda"], ["trainer.device='cuda'", "no CUDA device"]),
        (["trainer.device=gpu"], ["trainer.device: ", "is no device", "'gpu'"]),
        (["trainer.device=mps"], ["trainer.device: ", "is no device", "'mps'"]),
        (["model.tokenizer=/no/folder"], ["model.tokenizer='/no/folder' is no folder"]),
        (["model.tokenizer='chars:'"], ["distinct characters"]),
        (["model.tokenizer='chars:aa'"], ["distinct characters"]),
        (["model.scratch.model_type=lama"], ["model.scratch", "'lama'"]),
        (["model.scratch.hidden_size=abc"], ["model.scratch"]),
        (["actor.max_tokens_per_micro_batch=11"], ["actor.max_tokens_per_micro_batch=11"]),
        (["actor.mini_batches_per_epoch=9"], ["actor.mini_batches_per_epoch=9", "8 responses"]),
        (["trainer.output_dir=/proc/run"], ["trainer.output_dir='/proc/run' can't be written"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)  # fmt: skip
def test_bad_input_is_refused_before_a_model_is_loaded(
    tmp_path: Path, command: Command, words: list[str], said: list[str]
) -> None:
    if torch.cuda.is_available() and "cuda" in words[0]:
        pytest.skip("there is a CUDA device")
    errors = refused(command, "train", config_file(tmp_path), *words)
    assert all(part in errors for part in said), errors


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(("tracker", "package"), [("tensorboard", "tensorboard"), ("wandb", "wandb")])
def test_a_tracker_without_its_package(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, tracker: str, package: str
) -> None:
    from verl.observe import trackers

    find = trackers.find_spec
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name == package else find(name))
    errors = refused(command, "train", config_file(tmp_path), f"track.trackers=[{tracker}]")
    assert "pip install 'verl[track]'" in errors and tracker in errors


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("", ["holds no rows"]),
        ('{"prompt": "1+1=", "ground_truth": "2"}\n{"prompt": \n', ["train.jsonl:2"]),
        ('{"question": "1+1=", "ground_truth": "2"}\n', ["data.prompt_key", "'question'"]),
        ('{"prompt": "1+1=", "ground_truth": "2"}\n{"prompt": 5, "ground_truth": "2"}\n', ["train.jsonl:2", "int 5"]),
        ('{"prompt": "1+1="}\n', ["data.ground_truth_key"]),
        ('{"prompt": [{"role": "user", "content": "1+1="}], "ground_truth": "2"}\n', ["no chat template"]),
    ],
    ids=["empty", "broken row", "no column", "no prompt", "no truth", "messages"],
)
def test_bad_data(tmp_path: Path, command: Command, rows: str, said: list[str]) -> None:
    file = config_file(tmp_path)
    (tmp_path / "train.jsonl").write_text(rows)
    errors = refused(command, "train", file)
    assert all(part in errors for part in said), errors


def test_prompts_over_the_limit_are_counted(tmp_path: Path, command: Command) -> None:
    file = config_file(tmp_path, trainer__total_steps=1)
    write_jsonl(tmp_path / "train.jsonl", [*prompts(2), {"prompt": "123456789", "ground_truth": "1"}])
    code, out, _ = command("train", file, "--dry-run")
    assert code == 0 and "read 3 rows, kept 2; 1 dropped (overlong)" in out and "train.jsonl:3" in out
    assert not (tmp_path / "run").exists()
    assert command("train", file)[0] == 0


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{broken")


def break_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x10\x00\x00")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: shutil.rmtree(folder), ["model.path=", "is no folder"]),
        (lambda folder: (folder / "tokenizer.json").unlink(), ["holds no tokenizer", "Set model.tokenizer"]),
        (break_config, ["model.path="]),
        (lambda folder: (folder / "config.json").unlink(), ["model.path="]),
        (lambda folder: (folder / "model.safetensors").unlink(), ["doesn't load as a causal language model"]),
        (break_weights, ["doesn't load as a causal language model"]),
    ],
    ids=["no folder", "no tokenizer", "broken config", "no config", "no weights", "broken weights"],
)
def test_bad_model_folders(tmp_path: Path, command: Command, change: Callable[[Path], object], said: list[str]) -> None:
    folder = tiny_folder(tmp_path / "model")
    change(folder)
    words = [f"model.path={folder}", "model.scratch=null", "model.tokenizer=null", "data.chat=never"]
    errors = refused(command, "train", config_file(tmp_path), *words)
    assert all(part in errors for part in said), errors


def test_other_faults_of_a_run_end_with_one_line(tmp_path: Path, command: Command) -> None:
    file = config_file(tmp_path, reward={"function": f"{REWARDS}:boom", "workers": 0})
    assert "failed on all 8 responses" in refused(command, "train", file)
    file = config_file(tmp_path)
    assert command("train", file)[0] == 0
    assert "trainer.resume is never" in refused(command, "train", file, "trainer.resume=never")
    assert "algorithm.name was 'grpo', is 'ppo'" in refused(command, "train", file, "algorithm=ppo")
    code, out, _ = command("train", file)
    assert code == 0 and "mean reward" in out


def test_dry_run_prints_a_config_that_runs(tmp_path: Path, command: Command) -> None:
    code, out, _ = command("train", config_file(tmp_path), "--dry-run", "actor.optim.lr=1e-3")
    assert code == 0 and "lr: 0.001" in out and "# steps: 2 of 2 prompts × 4 responses" in out
    (tmp_path / "printed.yaml").write_text(out)
    assert command("train", tmp_path / "printed.yaml", "--dry-run")[1] == out


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import no_such_module_xyz", "No module named 'no_such_module_xyz'"),
        ("score = (", "SyntaxError"),
        ("def other(response): return 1.0", "has no 'score'"),
        ("raise SystemExit(3)", "can't be loaded"),
    ],
)
def test_a_dry_run_loads_the_rewards_function_as_the_run_does(
    tmp_path: Path, command: Command, code: str, said: str, workers: int
) -> None:
    (tmp_path / "reward.py").write_text(code)
    file = config_file(tmp_path, reward={"function": f"{tmp_path / 'reward.py'}:score", "workers": workers})
    errors = refused(command, "train", file, "--dry-run")
    assert said in errors and errors == refused(command, "train", file)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_column_that_the_reward_needs_is_missed_before_a_model_is_loaded(
    tmp_path: Path, command: Command, workers: int
) -> None:
    file = config_file(tmp_path, reward={"name": "reasoning_gym", "workers": workers})
    said = refused(command, "train", file, "--dry-run")
    assert "data.train: the reward needs 'entry'" in said and said == refused(command, "train", file)
    train = write_jsonl(tmp_path / "train.jsonl", [{"prompt": "9", "entry": {}, "ground_truth": "1"}] * 4)
    val = write_jsonl(tmp_path / "val.jsonl", [{"prompt": "8", "ground_truth": "1"}])
    words = [f"data.train={train}", f"data.val={val}"]
    assert "data.val: the reward needs 'entry'" in refused(command, "train", file, "--dry-run", *words)
    assert command("train", file, "--dry-run", words[0])[0] == 0


@pytest.mark.usefixtures("no_model")
def test_a_dry_run_leaves_no_process_behind(tmp_path: Path, command: Command) -> None:
    (tmp_path / "reward.py").write_text(
        "import os, pathlib, subprocess\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "place = pathlib.Path(__file__).with_name(f'{os.getpid()}.pids')\n"
        "place.write_text(f'{os.getpid()} {child.pid}')\n"
        "def score(response): return 1.0\n"
    )
    file = config_file(tmp_path, reward={"function": f"{tmp_path / 'reward.py'}:score", "workers": 2})
    assert command("train", file, "--dry-run")[0] == 0
    pids = [int(pid) for path in tmp_path.glob("*.pids") for pid in path.read_text().split()]
    assert pids and all(is_gone(pid) for pid in pids)
    assert not (tmp_path / "run").exists()


def test_the_algorithm_by_word(tmp_path: Path, command: Command) -> None:
    assert command("train", config_file(tmp_path, trainer__total_steps=1), "algorithm=ppo")[0] == 0
    assert "critic/value_loss" in metrics_of(tmp_path / "run")[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


def generated(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_generate_writes_every_field_and_greedy_is_the_plain_forward(
    tmp_path: Path, command: Command, model: Path
) -> None:
    file = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "w9 w8"}, {"prompt": "w20"}])
    out = tmp_path / "deep" / "out.jsonl"
    words = ["--model", model, "--prompts", file, "--out", out, "--max-new-tokens", 6, "--temperature", 0]
    code, said, _ = command("generate", *words, "--device", "cpu")
    assert code == 0 and f"2 responses written to {out}" in said
    module, tokenizer = tiny_model("llama"), word_tokenizer()
    for i, row in enumerate(generated(out)):
        assert list(row) == ["row_id", "sample", "prompt_ids", "response_ids", "log_probs", "finish_reason", "text"]
        assert (row["row_id"], row["sample"]) == (i, 0)
        assert row["response_ids"] == greedy(module, row["prompt_ids"], 6)
        assert row["text"] == tokenizer.decode(row["response_ids"], skip_special_tokens=True)
        assert len(row["log_probs"]) == len(row["response_ids"]) and all(x <= 0 for x in row["log_probs"])
        assert row["finish_reason"] == ("stop" if row["response_ids"][-1] == 2 else "length")


def test_generate_by_seed(tmp_path: Path, command: Command, model: Path) -> None:
    file = write_jsonl(tmp_path / "p.jsonl", [{"q": "w9 w8"}, {"q": "w20"}])
    made = []
    for seed in (1, 1, 2):
        words = ["--model", model, "--prompts", file, "--out", tmp_path / "o", "--max-new-tokens", 5, "--device", "cpu"]
        assert command("generate", *words, "--seed", seed, "--num-samples", 3, "--prompt-key", "q")[0] == 0
        made.append(generated(tmp_path / "o"))
    assert made[0] == made[1] != made[2]
    assert [(row["row_id"], row["sample"]) for row in made[0]] == [(i, k) for i in (0, 1) for k in (0, 1, 2)]
    assert len({tuple(row["response_ids"]) for row in made[0]}) > 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompts", "/no/file.jsonl"], "--prompts: no such file or folder: '/no/file.jsonl'"),
        (["--prompt-key", "question"], "--prompt-key: no column 'question'"),
        (["--num-samples", "0"], "--num-samples must be at least 1"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be >= 1"),
        (["--temperature", "-1"], "--temperature must be 0 (greedy)"),
        (["--top-p", "0"], "--top-p must be in (0, 1]"),
        (["--max-new-tokens", "256"], "the model has 256 positions. Lower --max-new-tokens"),
        (["--max-new-tokens", "253"], "the model has 256 positions, and the response may take all but 3"),
        (["--model", "/no/model"], "--model='/no/model' is no folder"),
        (["--out", "/proc/x/y"], "can't be written"),
        (["--out", "."], "is a folder"),
        (["--device", "tpu"], "--device='tpu'"),
        (["--seed", "-3"], "--seed must be at least 0"),
        (["--seed", str(2**64)], "--seed must be at least 0"),
        (["--stop", ""], "--stop must be"),
    ],
)
def test_generate_refuses(tmp_path: Path, command: Command, model: Path, words: list[str], said: str) -> None:
    file = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "w9 w8 w7"}])
    good = {"--model": model, "--prompts": file, "--out": tmp_path / "o", "--max-new-tokens": 4, "--device": "cpu"}
    given = {**good, words[0]: words[1]}
    errors = refused(command, "generate", *(x for pair in given.items() for x in pair))
    assert said in errors and not re.search(r"data\.|model\.|trainer\.|max_new_tokens", errors), errors
    assert not (tmp_path / "o").exists()


def test_eval(tmp_path: Path, command: Command, model: Path) -> None:
    data = write_jsonl(tmp_path / "d.jsonl", [{"prompt": f"w{i + 6}", "ground_truth": str(i)} for i in range(10)])
    words = ["eval", "--model", model, "--data", data, "--max-new-tokens", 3, "--device", "cpu"]
    reward = ["--reward", f"{REWARDS}:row_number", "--passing", 8]
    code, out, _ = command(*words, *reward, "--json", "--out", tmp_path / "rows.jsonl", "--num-samples", 2)
    found = json.loads(out)
    assert code == 0 and (found["score/mean"], found["rows"], found["pass@1"]) == (4.5, 10, 0.2)
    assert len(generated(tmp_path / "rows.jsonl")) == 20
    code, out, _ = command(*words, *reward, "--max-rows", 3)
    assert code == 0 and "score/mean" in out and "  1\n" in out
    assert "did you mean 'exact'" in refused(command, *words, "--reward", "exakt")
    assert "error: --max-rows: " in refused(command, *words, *reward, "--max-rows", 0)
    assert "--passing must be" in refused(command, *words, *reward, "--passing", "nan")
    assert "set --ground-truth-key to one of them" in refused(command, *words, *reward, "--ground-truth-key", "answer")
    assert "failed on all 10" in refused(command, *words, "--reward", f"{REWARDS}:boom")


def test_responses_that_do_not_fit_on_the_disk(tmp_path: Path, command: Command, model: Path) -> None:
    data = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "w9 w8", "ground_truth": "w7"}] * 9)
    out = tmp_path / "out.jsonl"
    (tmp_path / "full").symlink_to("/dev/full")
    words = ["--model", model, "--max-new-tokens", 3, "--device", "cpu"]
    scoring = ["eval", *words, "--data", data, "--reward", "exact", "--json", "--out"]
    out.write_text("as it was")
    with files_of_at_most(500):
        said = refused(command, "generate", *words, "--prompts", data, "--out", out)
        code, metrics, errors = command(*scoring, out)
    assert f"--out '{out}' can't be written" in said and said.count("\n") == 1
    assert code == 1 and json.loads(metrics)["rows"] == 9
    assert errors.splitlines()[-1].startswith(f"error: --out '{out}' can't be written")
    assert out.read_text() == "as it was" and not list(tmp_path.glob(".*"))
    code, metrics, errors = command(*scoring, tmp_path / "full")
    assert code == 1 and json.loads(metrics)["rows"] == 9 and "No space left" in errors


@pytest.mark.parametrize("out", ["/proc/o", "/proc/x/o"])
def test_a_folder_that_takes_no_file_is_found_before_the_model_is_loaded(
    tmp_path: Path, command: Command, out: str
) -> None:
    words = ["--model", "/no/model", "--out", out]
    assert f"--out '{out}' can't be written" in refused(command, "eval", *words, "--data", "x", "--reward", "exact")
    assert f"--out '{out}' can't be written" in refused(command, "generate", *words, "--prompts", tmp_path / "x")


def test_text_that_the_tokenizer_of_a_model_does_not_know(tmp_path: Path, command: Command) -> None:
    folder = tiny_folder(tmp_path / "model")
    character_tokenizer("0123456789").save_pretrained(folder)
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "1z", "ground_truth": "3"}])
    words = ["--model", folder, "--max-new-tokens", 4, "--device", "cpu"]
    code, _, said = command("eval", *words, "--data", rows, "--reward", "exact")
    assert code == 1 and "error: --data: 1 of 1 rows" in said and "set --model, now " in said and "'z'" in said


def test_the_input_is_looked_at_before_the_model_is_loaded(tmp_path: Path, command: Command) -> None:
    folder = tiny_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "w9 w8", "ground_truth": "w7"}])
    words = ["--model", folder, "--max-new-tokens", 4, "--device", "cpu"]
    for data, said in (
        ("/no/file.jsonl", "no such file or folder: '/no/file.jsonl'"),
        (rows, "doesn't load as a causal"),
    ):
        assert said in refused(command, "generate", *words, "--prompts", data, "--out", tmp_path / "o")
        assert said in refused(command, "eval", *words, "--data", data, "--reward", "exact")
    assert "no column 'q'" in refused(command, "eval", *words, "--data", rows, "--reward", "exact", "--prompt-key", "q")
    needy = refused(command, "eval", *words, "--data", rows, "--reward", "reasoning_gym")
    assert "--data: the reward needs 'entry'" in needy and "rows.jsonl" in needy
    missing = ["--data", rows, "--reward", "no_such_module_xyz:f"]
    assert "the reward's function can't be loaded" in refused(command, "eval", *words, *missing)


def test_export_is_the_trained_model(tmp_path: Path, command: Command) -> None:
    from verl.config import load_config
    from verl.trainer.ppo_trainer import PPOTrainer

    trainer = PPOTrainer.from_config(load_config(config_file(tmp_path)))
    start = {name: tensor.clone() for name, tensor in trainer.parts.roles.module.state_dict().items()}
    trainer.run()
    trainer.close()
    code, out, _ = command("export", tmp_path / "run", tmp_path / "model")
    assert code == 0 and str(tmp_path / "model") in out
    ids = torch.tensor([[5, 6, 7, 8]])
    saved = tmp_path / "run" / "checkpoints" / checkpoints_of(tmp_path / "run")[-1] / "actor" / "model"
    trained = dict(trainer.parts.roles.module.state_dict())
    assert any(not torch.equal(start[name], trained[name]) for name in start)
    logits = []
    for folder in (tmp_path / "model", saved):
        plain = AutoModelForCausalLM.from_pretrained(folder)
        assert "verl" not in (folder / "config.json").read_text()
        assert all(torch.equal(tensor, trained[name]) for name, tensor in plain.state_dict().items())
        logits.append(plain(input_ids=ids).logits)
        assert AutoTokenizer.from_pretrained(folder)("1+2=")["input_ids"] == [3, 12, 4, 13]
    assert torch.equal(*logits)


def test_a_report_for_a_terminal_without_the_characters(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/score/mean": 0.5}\n')
    command = [sys.executable, "-m", "verl", "report", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "mean reward, first 1        0.5000" in done.stdout


def test_export_and_report_of_nothing(tmp_path: Path, command: Command) -> None:
    assert "is no folder" in refused(command, "export", tmp_path / "nothing", tmp_path / "x")
    assert "no run folder" in refused(command, "export", tmp_path, tmp_path / "x")
    assert "no metrics" in refused(command, "report", tmp_path)


@pytest.fixture
def two_runs(tmp_path: Path) -> list[Path]:
    """Finished runs of two steps and a validation."""
    for name, score in (("grpo", 0.5), ("ppo", 0.25)):
        lines = [{"step": 1, "reward/score/mean": 0.0}, {"step": 2, "reward/score/mean": score}]
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "metrics.jsonl", [{"step": 0, "validation/score/mean": score}, *lines])
    return [tmp_path / "grpo", tmp_path / "ppo"]


def test_a_report_of_several_runs(tmp_path: Path, two_runs: list[Path], command: Command) -> None:
    code, said, _ = command("report", *two_runs)
    rows = [line.split() for line in said.splitlines()]
    assert code == 0 and len(rows) == 3
    assert rows[1:] == [["grpo", "2", "0.2500", "0.2500", "0.5000", "0", "-"],
                        ["ppo", "2", "0.1250", "0.1250", "0.2500", "0", "-"]]  # fmt: skip
    files = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert files == ["metrics.jsonl"] * 2
    assert command("report", two_runs[0] / "metrics.jsonl", two_runs[1])[1] == said


def test_a_report_draws_where_it_is_told_to(tmp_path: Path, two_runs: list[Path], command: Command) -> None:
    pytest.importorskip("matplotlib")
    for runs, picture, heading in ((two_runs, "new/both.png", "run "), (two_runs[:1], "one.png", "reward/score/mean")):
        code, said, _ = command("report", *runs, "--png", tmp_path / picture)
        assert code == 0 and said.startswith(heading)
        assert (tmp_path / picture).read_bytes()[:4] == b"\x89PNG"
    assert [path.name for path in two_runs[0].iterdir()] == ["metrics.jsonl"]
    command("report", two_runs[0] / "metrics.jsonl")
    assert (two_runs[0] / "reward.png").exists()


def test_a_picture_that_cant_be_written(tmp_path: Path, two_runs: list[Path], command: Command) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "both.png"
    picture.write_text("as it was")
    with files_of_at_most(1000):
        said = refused(command, "report", *two_runs, "--png", picture)
        code, text, errors = command("report", two_runs[0])
    assert f"--png '{picture}' can't be written" in said and said.count("\n") == 1
    assert picture.read_text() == "as it was" and not list(tmp_path.glob(".*"))
    assert code == 0 and "reward/score/mean" in text and "Traceback" not in errors
    assert not (two_runs[0] / "reward.png").exists()
    for name in ("c.jpg", "c", "new/c.svg"):
        assert "must end in .png" in refused(command, "report", *two_runs, "--png", tmp_path / name)
    assert not (tmp_path / "new").exists() and not (tmp_path / "c.jpg").exists()


def test_a_report_that_is_refused_prints_nothing_else(
    tmp_path: Path, two_runs: list[Path], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    write_jsonl(tmp_path / "other" / "metrics.jsonl", [{"step": 1, "actor/kl": 0.5}])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    picture = tmp_path / "curves.png"
    for words, message in (
        ([*two_runs, tmp_path / "absent"], str(tmp_path / "absent")),
        ([tmp_path / "other", "--png", picture], "nothing to draw"),
        ([*two_runs, "--png", tmp_path], "--png"),
        ([*two_runs, "--png", picture], "verl[plot]"),
        ([two_runs[0], "--png", picture], "verl[plot]"),
    ):
        code, said, errors = command("report", *words)
        assert code == 1 and not said and errors.startswith("error: ") and message in errors
    assert not picture.exists()
