from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import config_file
from verl.common.errors import ConfigError, UnknownName
from verl.config import load_config, read_sections, recipes

BASE = """
model: {{path: m}}
data: {{train: t.jsonl}}
reward: {{name: exact}}
algorithm: {algorithm}
{more}
"""


def file_of(folder: Path, more: str = "", algorithm: str = "grpo") -> Path:
    path = folder / "run.yaml"
    path.write_text(BASE.format(more=more, algorithm=algorithm))
    return path


def problem(path: Path | str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


NUMBERS = [("1e-6", 1e-06), ("5e-5", 5e-05), ("1E-3", 1e-3), ("'1e-6'", 1e-06), ("2", 2.0), (".5", 0.5), ("1_0", 10.0)]


@pytest.mark.parametrize(("text", "value"), NUMBERS)
@pytest.mark.parametrize("way", ["file", "override", "environment"])
def test_a_number_is_the_same_by_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, value: float, way: str
) -> None:
    if way == "file":
        run = load_config(file_of(tmp_path, f"actor: {{optim: {{lr: {text}}}}}"))
    elif way == "override":
        run = load_config(file_of(tmp_path), [f"actor.optim.lr={text}"])
    else:
        monkeypatch.setenv("LR", text.strip("'"))
        run = load_config(file_of(tmp_path, "actor: {optim: {lr: '${oc.env:LR}'}}"))
    assert run.actor.optim.lr == value and isinstance(run.actor.optim.lr, float)


@pytest.mark.parametrize("way", ["file", "override"])
@pytest.mark.parametrize(("text", "value"), [("1e6", 1_000_000), ("1e2", 100), ("12", 12), ("'12'", 12), ("3.0", 3)])
def test_whole_numbers(tmp_path: Path, way: str, text: str, value: int) -> None:
    more, words = (f"trainer: {{total_steps: {text}}}", []) if way == "file" else ("", [f"trainer.total_steps={text}"])
    steps = load_config(file_of(tmp_path, more), words).trainer.total_steps
    assert steps == value and isinstance(steps, int)


@pytest.mark.parametrize("way", ["file", "override", "environment"])
@pytest.mark.parametrize("text", ["abc", "on", "yes", "[1e-6]", "{a: 1}", "'1e-6 '' '", "nan", ".inf", "-1"])
def test_what_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, text: str) -> None:
    if way == "file":
        said = problem(file_of(tmp_path, f"actor: {{optim: {{lr: {text}}}}}"))
    elif way == "override":
        said = problem(file_of(tmp_path), f"actor.optim.lr={text}")
    else:
        monkeypatch.setenv("LR", text)
        said = problem(file_of(tmp_path, "actor: {optim: {lr: '${oc.env:LR}'}}"))
    assert "actor.optim.lr" in said
    if text in ("abc", "on", "-1"):
        assert {"abc": "'abc'", "on": "on", "-1": "-1"}[text] in said or "True" in said


@pytest.mark.parametrize("text", ["1.5", "0", "many", "on"])
def test_what_is_no_number_of_steps(tmp_path: Path, text: str) -> None:
    assert "trainer.total_steps" in problem(file_of(tmp_path), f"trainer.total_steps={text}")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor.optim.leraning_rate=1e-5", ["actor.optim", "unknown key 'leraning_rate'"]),
        ("actor.optim.warmup_step=1", ["actor.optim", "'warmup_step'", "did you mean 'warmup_steps'"]),
        ("actor.lr=1e-5", ["actor: unknown key 'lr'", "known as actor.optim.lr, critic.optim.lr"]),
        ("trainer.temperature=1", ["trainer: unknown key 'temperature'", "rollout.temperature"]),
        ("actor.optim.beta2=0.95", ["unknown key 'beta2': write betas: [beta1, beta2]"]),
        ("actor.optim.betas=0.9", ["actor.optim.betas", "valid list, got 0.9"]),
        ("actor.optim.betas=[0.9]", ["actor.optim.betas", "at least 2 items", "got [0.9]"]),
        ("actor.optim.betas=[0.9,0.99,0.999]", ["actor.optim.betas", "at most 2 items", "got [0.9, 0.99, 0.999]"]),
        ("actor.optim.betas=[0.9,1]", ["actor.optim.betas.1", "less than 1, got 1"]),
        ("actor.optim.betas=[-0.1,0.9]", ["actor.optim.betas.0", "greater than or equal to 0, got -0.1"]),
        ("reference.gradient_checkpointing=true", ["reference: unknown key", "the role makes no backward pass"]),
        ("reference.reshard_after_forward=false", ["reference: unknown key", "always freed after use"]),
        ("algorithm.overlong.max_tokens=8", ["algorithm.overlong: unknown", "it is rollout.max_response_tokens"]),
        ("algorithm.overlong.buffer_tokens=10000", ["overlong.buffer_tokens=10000 is more than rollout.max_response_"]),
        ("algorithm.loss_norm_tokens=512", ["unknown key 'loss_norm_tokens': it is rollout.max_response_tokens"]),
        ("track.run_name=x", ["unknown key 'run_name': a run has the name of its folder, trainer.output_dir"]),
        ("total_steps=3", ["unknown key 'total_steps'", "known as trainer.total_steps"]),
        ("trainr.seed=1", ["unknown key 'trainr'; did you mean 'trainer'"]),
        ("algorithm.cliphigh=0.3", ["algorithm", "'cliphigh'; did you mean 'clip_high'"]),
        ("algorithm.gamma=0.9", ["algorithm", "unknown key 'gamma'"]),
        ("rollout.top_k=5", ["rollout", "unknown key 'top_k'"]),
        ("algorithm.name=gpro", ["unknown algorithm 'gpro'; did you mean 'grpo'"]),
        ("rollout.name=nativ", ["unknown rollout engine 'nativ'; did you mean 'native'"]),
        ("reward.name=exakt", ["reward.name", "'exakt'; did you mean 'exact'"]),
        ("trainer.resume=maybe", ["trainer.resume", "'auto'", "'never'", "'maybe'"]),
        ("actor.optim=adam", ["actor.optim", "adam"]),
        ("trainer=5", ["trainer", "5"]),
        ("data.max_prompt_tokens=0", ["data.max_prompt_tokens", "0"]),
    ],
)
def test_wrong_keys_and_values_are_named(tmp_path: Path, override: str, words: list[str]) -> None:
    """The same in a file as on the command line."""
    by_override = problem(file_of(tmp_path), override)
    key, _, value = override.partition("=")
    nested = value
    for part in reversed(key.split(".")):
        nested = f"{{{part}: {nested}}}"
    path = tmp_path / "nested.yaml"
    base = read_sections(file_of(tmp_path))
    from omegaconf import OmegaConf

    loaded, extra = OmegaConf.create(base), OmegaConf.create(nested)
    if key.startswith("algorithm."):
        loaded.algorithm = {"name": loaded.algorithm}
    path.write_text(OmegaConf.to_yaml(OmegaConf.merge(loaded, extra)))
    by_file = problem(path)
    for word in words:
        assert word in by_override and word in by_file, (by_override, by_file)


def test_all_problems_at_once(tmp_path: Path) -> None:
    said = problem(file_of(tmp_path), "actor.optim.lr=abc", "trainer.sede=1", "rollout.temperature=-1")
    assert "actor.optim.lr" in said and "did you mean 'seed'" in said and "rollout.temperature" in said


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.seed=1", "trainer.seed=2"], "'trainer.seed' is given twice: 'trainer.seed=1' and 'trainer.seed=2'"),
        (["trainer.seed=1", "trainer={seed: 2}"], "keys 'trainer.seed' and 'trainer' overlap"),
        (["trainer.seed"], "'trainer.seed' is no override: write key.path=value"),
        (["=3"], "'=3' is no override"),
        (["--seed=3"], "--seed"),
        (["trainer.seed=[1"], "trainer.seed"),
        (["trainer..seed=1"], "seed"),
        (["data.train.x.y=1"], "data.train"),
    ],
)
def test_overrides_that_say_nothing_clear(tmp_path: Path, overrides: list[str], words: str) -> None:
    assert words in problem(file_of(tmp_path), *overrides)


@pytest.mark.parametrize(
    "more",
    ["trainer: {seed: 1}\ntrainer: {seed: 2}", "trainer:\n  seed: 1\n  seed: 2", "model: {path: other}"],
    ids=["section", "key", "distant"],
)
def test_a_key_twice_in_the_file(tmp_path: Path, more: str) -> None:
    said = problem(file_of(tmp_path, more))
    assert "duplicate key" in said and ("seed" in said or "trainer" in said or "model" in said)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "missing: model.path"),
        ("# nothing\n", "missing: model.path"),
        ("- a\n- b\n", "must hold sections"),
        ("just words", "unknown key 'just words'"),
        ("model: [unclosed\n", "is no valid YAML"),
        ("model:\n\tpath: x\n", "is no valid YAML"),
        ("3", "sections"),
        ("{a: *b}", "is no valid YAML"),
        ("model: ${oc.env:NOT_SET_ANYWHERE}\n", "NOT_SET_ANYWHERE"),
        ("model: ${trainer.nothing}\n", "trainer.nothing"),
        ("model:\n  path: ???\n", "model.path"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    said = problem(path)
    assert words in said, said


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    said = problem(tmp_path / "nowhere.yaml")
    assert "there is no config file" in said and "nowhere.yaml" in said and said.endswith("quickstart")
    assert "can't be read" in problem(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "can't be read" in problem(tmp_path / "binary.yaml")
    with pytest.raises(UnknownName, match=r"'quikstart'; did you mean 'quickstart'\?"):
        load_config("quikstart")


@pytest.mark.parametrize("drop", ["model", "data", "reward", "algorithm"])
@pytest.mark.parametrize("how", ["absent", "null"])
def test_a_missing_section_is_named_with_its_key(tmp_path: Path, drop: str, how: str) -> None:
    lines = [line for line in BASE.format(more="", algorithm="grpo").splitlines() if not line.startswith(drop)]
    path = tmp_path / "run.yaml"
    path.write_text("\n".join([*lines, f"{drop}:" if how == "null" else ""]))
    key = {"model": "model.path", "data": "data.train", "reward": "reward.name", "algorithm": "algorithm.name"}[drop]
    said = problem(path)
    assert f"missing: {key}" in said
    assert how == "null" or said.count("\n") == 0, said


def test_null_sections_with_defaults_are_their_defaults(tmp_path: Path) -> None:
    run = load_config(file_of(tmp_path, "actor:\ntrainer:\nrollout:\nvalidation: null"))
    assert run.actor.optim.lr == 1e-6 and run.rollout.name == "native"


def test_the_algorithm_by_word(tmp_path: Path) -> None:
    path = file_of(tmp_path, algorithm="{name: grpo, normalise_by_std: false}")
    run = load_config(path, ["algorithm=ppo"])
    assert run.algorithm.name == "ppo" and "critic" in run.model_dump()
    short = load_config(file_of(tmp_path), ["algorithm.kl_coef=0.1"])
    assert (short.algorithm.name, short.algorithm.model_dump()["kl_coef"]) == ("grpo", 0.1)


IDLE = [
    (["critic.optim.lr=1e-5"], "critic: algorithm 'grpo' as configured uses no critic"),
    (["reference.max_tokens_per_micro_batch=9999"], "uses no reference"),
    (["validation.every=5"], "validation: needs data.val"),
    (["data.max_val_rows=5"], "data.max_val_rows: needs data.val"),
    (["data.exclude_val=true"], "data.exclude_val: needs data.val"),
    (["trainer.epochs=2", "trainer.total_steps=5"], "trainer.epochs: trainer.total_steps is given"),
    (["algorithm.kl_estimator=k2"], "algorithm.kl_estimator"),
    (["model.lora.alpha=8"], "model.lora.alpha: needs model.lora.rank"),
    (["profile.record=[stacks]"], "profile.record: needs profile.steps"),
    (["reward.workers=0", "reward.timeout_s=3"], "reward.timeout_s: needs reward.workers above 0"),
    (["data.val=v.jsonl", "validation.samples_per_prompt=4"], "validation.samples_per_prompt: validation.temperature"),
]


@pytest.mark.parametrize(("overrides", "words"), IDLE)
def test_keys_without_effect_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, overrides: list[str], words: str
) -> None:
    load_config(file_of(tmp_path), overrides)
    assert any(r.levelno == logging.WARNING and words in r.getMessage() for r in caplog.records), caplog.text


def test_a_config_without_such_keys_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = load_config(file_of(tmp_path), ["actor.optim.lr=1e-5"])
    saved = tmp_path / "saved.yaml"
    saved.write_text(run.as_yaml())
    assert load_config(saved) == run
    assert not caplog.records


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_effective_config_reads_back_as_itself(tmp_path: Path, algorithm: str) -> None:
    path = config_file(tmp_path, algorithm={"name": algorithm, "kl_coef": 0.1}, rollout__stop=["a", "1"])
    run = load_config(path, ["model.tokenizer=chars:0123456789+=", "data.system_prompt='on'"])
    (tmp_path / "saved.yaml").write_text(run.as_yaml())
    again = load_config(tmp_path / "saved.yaml")
    assert again == run and again.as_yaml() == run.as_yaml()
    assert again.data.system_prompt == "on"


@pytest.mark.parametrize("name", sorted(recipes()))
def test_recipes_are_valid(name: str, caplog: pytest.LogCaptureFixture) -> None:
    run = load_config(name)
    assert Path(str(run.data.train)).is_file() and not caplog.records


def test_here_is_the_folder_of_the_file(tmp_path: Path) -> None:
    path = file_of(tmp_path, "trainer: {output_dir: '${here:}/out'}")
    assert load_config(path).trainer.output_dir == tmp_path / "out"


CONFLICTS: list[tuple[list[str], list[str]]] = [
    (["trainer.group_size=1"], ["trainer.group_size=1", "algorithm.name='grpo'", "at least 2"]),
    (["actor.max_tokens_per_micro_batch=100"], ["actor.max_tokens_per_micro_batch=100", "rollout.max_response_tokens"]),
    (["actor.mini_batches_per_epoch=257"], ["actor.mini_batches_per_epoch=257", "256 responses"]),
    (["rollout.temperature=0"], ["rollout.temperature", "> 0"]),
    (["algorithm.clip_low=-1"], ["algorithm.clip_low"]),
    (["model.scratch={model_type: llama}"], ["exactly one of model.path and model.scratch"]),
    (["reward.function=r.py:f"], ["reward"]),
    (["track.trackers=[jsonl]"], ["track.trackers", "always written"]),
    (["track.trackers=[tensorbord]"], ["did you mean 'tensorboard'"]),
]


@pytest.mark.parametrize(("overrides", "words"), CONFLICTS)
def test_sizes_that_cannot_be(tmp_path: Path, overrides: list[str], words: list[str]) -> None:
    said = problem(file_of(tmp_path), *overrides)
    assert all(word in said for word in words), said


def test_limits_of_roles_that_do_not_run_are_no_conflict(tmp_path: Path) -> None:
    """A long row needs the actor's budget raised, not that of a critic that isn't there."""
    words = ["rollout.max_response_tokens=20000", "actor.max_tokens_per_micro_batch=32768"]
    assert load_config(file_of(tmp_path), words)
    assert "critic.max_tokens_per_micro_batch=16384" in problem(file_of(tmp_path, algorithm="ppo"), *words)


def test_python_and_yaml_refuse_the_same(tmp_path: Path) -> None:
    from verl.trainer.ppo_trainer import PPOTrainer

    keys: dict[str, Any] = {"model": "m", "data": "t.jsonl", "reward": "exact", "actor": {"optim": {"lr": "abc"}}}
    with pytest.raises(ConfigError) as caught:
        PPOTrainer(**keys)
    assert str(caught.value) == problem(file_of(tmp_path), "actor.optim.lr=abc")


def test_the_config_of_a_run_on_objects_says_what_to_name(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    said = problem(path, "model.path='(given in Python)'", "data.train='(given in Python)'")
    assert "model.path, data.train was an object in the Python program" in said


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("trainer=[1]", r"trainer takes keys, such as trainer\.\w+=\.\., got the list \[1\]"),
        ("actor.optim=[1]", r"actor\.optim takes keys, such as actor\.optim\.lr=\.\., got the list \[1\]"),
        ("rollout.stop={a: 1}", r"rollout\.stop takes a list, such as rollout\.stop=\['x'\], got keys: \{'a': 1\}"),
    ],
)
def test_a_list_in_the_place_of_keys_is_named(tmp_path: Path, word: str, said: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {seed: 1}\nactor: {optim: {lr: 0.1}}\nrollout: {stop: [x]}\n")
    with pytest.raises(ConfigError, match=said):
        load_config(str(file), [word])
