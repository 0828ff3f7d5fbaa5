"""What the pages say is so: code runs, configs parse, commands exist, links resolve, every metric is defined."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from omegaconf import OmegaConf
from torch.distributed.run import get_args_parser

from tests.config_keys import reference
from tests.tiny import tiny_folder
from verl.algorithms import ALGORITHMS
from verl.batch import FIELDS
from verl.bench.rollout_config import RolloutBench
from verl.cli import app
from verl.common.errors import ConfigError
from verl.common.section import key_paths
from verl.trainer.base_sections import Run
from verl.trainer.families import run_class
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.preference_trainer import PreferenceTrainer
from verl.trainer.run_loop import RunLoop
from verl.trainer.sft_trainer import SFTTrainer

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "yaml", "bash", "text"}
FREE_MAPPINGS = ("model.scratch.", "reward.kwargs.", "data.chat_template_kwargs.")


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, what follows the language, its text and the line it begins at."""

    language: str
    rest: str
    text: str
    line: int


def blocks(path: Path, *languages: str) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = []
    for match in re.finditer(r"^( *)```([^\n]*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
        language, _, rest = match[2].strip().partition(" ")
        line = text.count("\n", 0, match.start()) + 2
        found.append(Block(language, rest, textwrap.dedent(match[3]), line))
    return [block for block in found if not languages or block.language in languages]


def with_blocks(*languages: str) -> list[Any]:
    return [pytest.param(path, id=page_id(path)) for path in PAGES if blocks(path, *languages)]


def prose(path: Path) -> str:
    return re.sub(r"^( *)```.*?^\1```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_blocks_are_of_a_kind_that_is_checked(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(blocks(path)) * 2 == len(re.findall(r"^ *```", text, re.MULTILINE)), "a fence that isn't closed"
    for block in blocks(path):
        assert block.language in LANGUAGES, f"line {block.line}: ```{block.language}"
        if block.rest:
            kind, _, reason = block.rest.partition(": ")
            assert (block.language, kind) == ("python", "no-run") and reason, f"line {block.line}: ```{block.rest}"


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that holds what the pages take for granted: an exported model and the metrics of a run."""
    tiny_folder(tmp_path / "exported")
    (tmp_path / "runs" / "gsm8k").mkdir(parents=True)
    row = json.dumps({"step": 1, "reward/score/mean": 0.25})
    (tmp_path / "runs" / "gsm8k" / "metrics.jsonl").write_text(row + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", with_blocks("python"))
def test_python_blocks_run(path: Path, workplace: Path) -> None:
    """All blocks of a page share their names, in order."""
    namespace: dict[str, Any] = {"__name__": "__page__"}
    for block in blocks(path, "python"):
        code = compile("\n" * (block.line - 1) + block.text, str(path), "exec")
        if not block.rest.startswith("no-run"):
            exec(code, namespace)
    trainers = [value for value in namespace.values() if isinstance(value, RunLoop)]
    for trainer in trainers:
        assert trainer.steps_done > 0
        trainer.close()


def as_run(text: str) -> Run:
    """A run made of the sections in ``text`` and the least of the others."""
    least = {"model": {"path": "m"}, "data": {"train": "d"}, "reward": {"name": "exact"}, "algorithm": {"name": "grpo"}}
    given: Any = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(given, Mapping)
    kind = run_class({**least, **given}["algorithm"]["name"])
    return kind.parse({name: keys for name, keys in {**least, **given}.items() if name in {*kind.model_fields, *given}})


@pytest.mark.parametrize("path", with_blocks("yaml"))
def test_yaml_blocks_are_configs_or_parts_of_one(path: Path) -> None:
    for block in blocks(path, "yaml"):
        as_run(block.text)


def test_a_wrong_yaml_block_would_be_seen() -> None:
    with pytest.raises(ConfigError, match="leraning_rate"):
        as_run("actor: {optim: {leraning_rate: 1.0}}")


def command_lines(text: str) -> list[list[str]]:
    joined = re.sub(r"\\\n\s*#?\s*", " ", text)
    lines = [shlex.split(line, comments=True) for line in joined.splitlines()]
    return [words for words in lines if words]


def check_verl(words: list[str]) -> None:
    """Command, options and override keys of ``verl ...``, without running it. Raises what the command line would."""
    command, context, rest = typer.main.get_command(app), None, words[1:]
    while True:
        context = command.make_context(command.name or "verl", list(rest), parent=context)
        if not hasattr(command, "resolve_command"):
            break
        _, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert command is not None
    known = [*reference().all_keys(), *key_paths(RolloutBench)]
    for word in context.params.get("overrides") or []:
        key = word.partition("=")[0]
        assert "=" in word and (key in known or key.startswith(FREE_MAPPINGS)), f"unknown key in {word!r}"


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert [word for word in words[1:] if "=" not in word and word not in targets] == []


def check_torchrun(words: list[str]) -> None:
    """torchrun's own options, and what it starts: ``-m verl ...``, or a script of examples/ with its config."""
    found = get_args_parser().parse_args(words[1:])
    rest = found.training_script_args
    if not found.module:
        assert (ROOT / "examples" / Path(found.training_script).name).is_file() and rest[0] == "--config"
        rest = ["train", *rest[1:]]
    check_verl(["verl", *rest])


CHECKS = {
    "verl": check_verl,
    "make": check_make,
    "torchrun": check_torchrun,
    "pip": lambda words: None,
    "ray": lambda words: None,
}


@pytest.mark.parametrize("path", with_blocks("bash"))
def test_commands_exist(path: Path) -> None:
    for block in blocks(path, "bash"):
        for words in command_lines(block.text):
            CHECKS[words[0]](words)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=page_id)
def test_commands_in_the_examples_comments_exist(path: Path) -> None:
    comments = "\n".join(re.findall(r"^# *(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE))
    for words in command_lines("\n".join(re.findall(r"^verl (?:.*\\\n)*.*", comments, re.MULTILINE))):
        check_verl(words)


@pytest.mark.parametrize(
    "line",
    [
        *("verl trian quickstart", "verl eval --modle m", "verl train quickstart actor.optim.rate=1", "verl export a"),
        *(
            "torchrun --nproc=x train_ppo.py",
            "torchrun train_grpo.py --config a",
            "torchrun train_ppo.py --config a b.c=1",
        ),
    ],
)
def test_a_wrong_command_would_be_seen(line: str) -> None:
    words = shlex.split(line)
    with pytest.raises((Exception, SystemExit)):  # of click's, argparse's and our own kinds
        CHECKS[words[0]](words)


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_links_between_pages_resolve(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        goal = (path.parent / file).resolve() if file else path
        assert goal.exists(), target
        assert not anchor or anchor in anchors(goal), target


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if f"({page})" not in index and page != "README.md"] == []


def test_readme_has_the_field_table() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, field in FIELDS.items():
        kind = "[B]" if field.shape == "row" else f"{field.shape}, ragged"
        dtype = str(field.dtype).removeprefix("torch.")
        row = f"| `{name}` | {kind}, {dtype} | {field.written_by} | {field.read_by} | {field.meaning} |"
        assert row in text, row
    assert len(re.findall(r"^\| `\w+` \| ", text, re.MULTILINE)) == len(FIELDS)


def test_readme_has_the_loop() -> None:
    """Its calls are those of the step, in the same order; the step may have more around them."""
    text = next(b.text for b in blocks(ROOT / "README.md", "python") if "body of PPOTrainer.make_step" in b.rest)
    shown, real = calls(text), iter(calls(textwrap.dedent(inspect.getsource(PPOTrainer.make_step))))
    assert len(shown) >= 6
    assert [call for call in shown if call not in real] == []


def calls(source: str) -> list[str]:
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    nodes.sort(key=lambda node: (node.func.end_lineno or 0, node.func.end_col_offset or 0))
    return [ast.unparse(node.func).partition("(")[0] for node in nodes if not isinstance(node.func, ast.Call)]


def test_readme_has_the_tree() -> None:
    text = next(b.text for b in blocks(ROOT / "README.md", "text") if b.text.startswith("verl/\n"))
    shown = {("verl/" if line.startswith("  ") else "") + line.split()[0].rstrip("/") for line in text.splitlines()}
    assert [path for path in shown if not (ROOT / path).exists()] == []
    there = {f"verl/{p.name}" for p in (ROOT / "verl").iterdir() if not p.name.startswith(("__", "py.typed"))}
    assert there - shown == set()


def test_metric_names_unfold() -> None:
    row = "| `a/b/mean`, `/max` | x |\n| `c/{mean,min}` \u2020, `d_s` | y |\n"
    assert documented(row) == ["a/b/mean", "a/b/max", "c/mean", "c/min", "d_s"]


def documented(text: str) -> list[str]:
    """Metric keys in the first cells of ``text``'s tables, with ``/stat`` and ``{a,b}`` unfolded."""
    keys: list[str] = []
    for cell in re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE):
        for word in re.findall(r"`([^`]+)`", cell):
            parts = [p[1:-1].split(",") if p.startswith("{") else [p] for p in re.split(r"(\{[^}]*\})", word)]
            names = ["".join(choice) for choice in itertools.product(*parts)]
            before = keys[-1].rpartition("/")[0] if keys else ""
            keys += [before + name if name.startswith("/") else name for name in names]
    return [key for key in keys if "/" in key.strip("/") or key.endswith("_s")]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_algorithm_pages_have_the_keys_and_their_defaults(name: str) -> None:
    shared, own = reference().variant_keys("algorithm")
    defaults = {key.name: key.default.strip("`") for key in [*shared, *own[name]]}
    page = (ROOT / "docs" / "algorithms" / f"{name}.md").read_text(encoding="utf-8")
    table = page.partition("\n## Keys\n")[2].partition("\n## ")[0]
    shown = key_table(table)
    assert {key.name for key in own[name]} <= shown.keys() <= defaults.keys()
    assert {key: value for key, value in shown.items() if yaml.safe_load(value) != yaml.safe_load(defaults[key])} == {}


def test_algorithms_overview_has_the_shared_keys_and_their_defaults() -> None:
    shared, own = reference().variant_keys("algorithm")
    assert len(own) > 1
    page = (ROOT / "docs" / "algorithms" / "README.md").read_text(encoding="utf-8")
    shown = key_table(page.partition("\n**Keys** ")[2].partition("\n**")[0])
    assert shown.keys() >= {key.name for key in shared}
    wrong = {k.name: shown[k.name] for k in shared if yaml.safe_load(shown[k.name]) != yaml.safe_load(k.default[1:-1])}
    assert wrong == {}


def key_table(text: str) -> dict[str, str]:
    """Key -> default, from rows such as ``| `a`, `b` | 1, 2 | why |``."""
    shown: dict[str, str] = {}
    for keys, values in re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", text, re.MULTILINE):
        shown |= dict(zip(re.findall(r"`([\w.]+)`", keys), values.split(", "), strict=True))
    return shown


METRICS_PAGE = ROOT / "docs" / "metrics.md"
NOT_ON_EVERY_MACHINE = {"perf/actor_mfu"}
"""Left out where the device's peak isn't known."""


def scored(response: str, ground_truth: str) -> dict[str, float]:
    """A score and a part, and a failure once in a while."""
    if response.endswith("7"):
        raise ValueError("a reward that fails on some responses")
    return {"score": float(len(response) % 2), "digits": float(sum(c.isdigit() for c in response))}


def one_step_runs(folder: Path) -> Iterator[Path]:
    shape = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    rows = [{"prompt": f"{a}+{b}=", "ground_truth": str(a + b)} for a in range(4) for b in range(3)]
    for split in ("one", "two"):
        lines = "".join(json.dumps(row) + "\n" for row in rows[:4])
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    common: dict[str, Any] = {
        "model": {"scratch": shape | {"num_attention_heads": 2}, "tokenizer": "chars:0123456789+="},
        "data": {"train": rows, "max_prompt_tokens": 8, "val": [str(folder / f"{s}.jsonl") for s in ("one", "two")]},
        "reward": {"function": scored, "workers": 0},
        "rollout": {"max_response_tokens": 3},
        "validation": {"samples_per_prompt": 2, "temperature": 1.0},
        "track": {"trackers": []},
    }
    correction = {"mode": "token"}
    for algorithm in (
        {"name": "grpo", "kl_coef": 0.1, "correction": correction},
        {"name": "ppo", "kl_coef": 0.1, "kl_in": "reward"},
        {"name": "dapo"},
        {"name": "remax"},
        {"name": "online_dpo"},
    ):
        trainer = {
            "output_dir": str(folder / algorithm["name"]),
            "prompts_per_step": 6,
            "group_size": 4,
            "device": "cpu",
        }
        made = PPOTrainer(**common, algorithm=algorithm, trainer=trainer, actor={"mini_batches_per_epoch": 2})
        made.run(num_steps=1)
        made.close()
        yield folder / algorithm["name"]
    judged = [{"prompt": f"{i}+1=", "chosen": "12", "rejected": "3", "response": "4", "label": i % 2} for i in range(6)]
    data = {"train": judged, "max_example_tokens": 12}
    demonstrations = {"train": judged, "max_example_tokens": 16}
    offline_runs = {"dpo": data, "kto": data, "bradley_terry": data, "sft": demonstrations}
    for name, rows in offline_runs.items():
        kind: Any = SFTTrainer if rows is demonstrations else PreferenceTrainer
        keys: dict[str, Any] = {"algorithm": name, "trainer": {"output_dir": str(folder / name), "device": "cpu"}}
        offline = kind(common["model"], rows, val=judged, track=common["track"], **keys)
        offline.run(num_steps=1)
        offline.close()
        yield folder / name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return list(one_step_runs(tmp_path_factory.mktemp("runs")))


def test_every_metric_that_a_run_writes_is_defined_and_the_other_way_round(runs: list[Path]) -> None:
    written: set[str] = set()
    for run in runs:
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            written |= json.loads(line).keys() - {"step"}
    assert {"critic/value_loss", "actor/kl", "actor/reward_kl", "reward/digits/mean"} <= written
    names = documented(METRICS_PAGE.read_text(encoding="utf-8"))
    patterns = {name: re.compile(re.sub(r"<\w+>", ".+", re.escape(name))) for name in names}
    plain = {name for name in names if "<" not in name}
    unknown = {k for k in written if k not in plain and not any(p.fullmatch(k) for p in patterns.values())}
    assert unknown == set(), "not defined in docs/metrics.md"
    idle = {name for name, pattern in patterns.items() if not any(pattern.fullmatch(key) for key in written)}
    assert idle - NOT_ON_EVERY_MACHINE == set(), "defined, and no run writes it"


def test_run_directory_and_lines_of_samples_are_described(runs: list[Path]) -> None:
    text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    table = text.partition("A line of `rollouts/` is one response:")[2].partition("\n## ")[0]
    described = {
        word for cell in re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE) for word in re.findall(r"\w+", cell)
    }
    for run in runs:
        if (run / "rollouts").exists():
            sample = (run / "rollouts" / "step_000001.jsonl").read_text(encoding="utf-8").splitlines()[0]
            assert json.loads(sample).keys() == described
        shown = {path.name for path in run.iterdir() if not path.name.startswith(".")}
        assert [name for name in shown if not re.search(rf"^  {re.escape(name)}\b", text, re.MULTILINE)] == []


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "algorithms").glob("*.md")), ids=page_id)
def test_metrics_on_the_algorithms_pages_are_defined_too(path: Path) -> None:
    names = documented(METRICS_PAGE.read_text(encoding="utf-8"))
    assert [name for name in documented(path.read_text(encoding="utf-8")) if name not in names] == []
