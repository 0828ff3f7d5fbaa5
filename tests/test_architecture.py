"""What holds of the whole tree: who may import whom, sizes, docstrings, registries, tests and pages for everything."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.config_keys import reference
from verl.common.registry import Registry

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "verl"
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = [path for path in FILES if path.name != "__init__.py"]

LEVELS = (
    "cli", "bench", "config", "trainer", "workers", "hybrid_engine", "engines rollout",
    "models algorithms rewards data controller", "batch observe", "common",
)  # fmt: skip
"""A package imports only what stands right of it; those on one level never import each other."""
OUTSIDE_LEVELS = {"__init__", "__main__", "recipes", "utils"}
"""The entry, data files, and the import path of the profiler, which only passes on a name."""

WITHOUT_TEST_FILE = {
    # run on CUDA only: tests/rollout/test_cuda.py
    *("rollout/native/decode", "rollout/native/graph", "rollout/native/kernel_step"),
    # inside the native engine: tests/rollout/native/test_engine.py and the conformance suite
    *("rollout/native/runner", "rollout/native/sequence"),
    # through what calls them: tests/models, tests/engines/test_base.py, tests/conformance
    *("models/attention", "engines/masters"),
    # what every executor does, and what only it does: tests/conformance/test_executors.py
    *(f"controller/executors/{name}" for name in ("base", "child", "inprocess", "lifeline", "processes", "ray")),
    *(f"controller/executors/{name}" for name in ("thread", "torchrun")),
    # glue of the loop, through whole runs: tests/trainer, tests/invariants, tests/test_cli.py
    "workers/reference",
    "trainer/run_in_progress",
    *(f"trainer/{name}" for name in ("assembly", "callbacks", "inference", "inputs", "launch", "measures", "sections")),
    # what is common to the trainers, through each of them: tests/trainer/test_{ppo,preference,sft}_trainer.py
    *(f"trainer/{name}" for name in ("base_sections", "offline_assembly", "offline_trainer", "parts", "roles")),
    "trainer/run_loop",
}
"""Modules that are tested from another file than their own."""
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_CONFIG_KEYS = 600, 100, 150


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Modules that ``path`` imports, anywhere in it; for ``from a import b`` both ``a`` and ``a.b``."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            module = node.module or ""
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def level_of(child: str) -> int:
    return next(i for i, level in enumerate(LEVELS) if child in level.split())


def test_import_rule_by_import_linter() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    if not tool.is_file():
        pytest.skip("import-linter isn't installed")
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 kept, 0 broken" in done.stdout


def test_import_linter_is_told_the_rule() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (contract,) = settings["contracts"]
    there = [[c for c in level.split() if child_exists(c)] for level in LEVELS]
    told = [[name.strip().removeprefix("verl.") for name in level.split("|")] for level in contract["layers"]]
    assert [sorted(level) for level in told] == [sorted(level) for level in there if level]
    assert "ignore_imports" not in contract


def child_exists(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def test_every_child_of_the_package_has_a_level() -> None:
    children = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p.is_dir() and p.name[0] not in "_.")}
    assert children - {name for level in LEVELS for name in level.split()} == OUTSIDE_LEVELS & children


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_to_the_right_and_never_to_a_sibling(path: Path) -> None:
    child = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if child in OUTSIDE_LEVELS:
        return
    for module in imports(path):
        parts = module.split(".")
        if parts[0] != "verl" or len(parts) == 1 or parts[1] == child or not child_exists(parts[1]):
            continue
        assert level_of(parts[1]) > level_of(child), f"{name_of(path)} imports {module}"


def loaded_after(code: str) -> set[str]:
    """Top-level packages that a fresh interpreter has loaded after ``code``."""
    ends = "\nimport json\nprint(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", "import sys\n" + code + ends], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


HEAVY = {"torch", "transformers", "tensordict", "datasets", "numpy", "pandas", "pyarrow", "omegaconf", "ray"}


@pytest.mark.parametrize("module", ["verl", "verl.cli", "verl.common.errors"])
def test_import_loads_nothing_heavy(module: str) -> None:
    assert not loaded_after(f"import {module}") & HEAVY


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "--version",
        "train --help",
        "report --help",
        *(f"bench {b} --help" for b in ("step", "rollout", "controller")),
    ],
)
def test_help_loads_nothing_heavy(words: str) -> None:
    code = f"""
sys.argv = ["verl", *{words.split()}]
from verl.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""
    assert not loaded_after(code) & HEAVY


def test_heavy_packages_would_be_seen() -> None:
    assert {"torch", "numpy"} <= loaded_after("import verl.common.seeding")


def test_ray_is_imported_in_one_file_at_most() -> None:
    assert len([p for p in FILES if any(m.partition(".")[0] == "ray" for m in imports(p))]) <= 1


@pytest.mark.parametrize("part", ["algorithms", "rewards"])
def test_pure_parts_know_no_process_group_and_no_run(part: str) -> None:
    for path in (PACKAGE / part).rglob("*.py"):
        assert not [m for m in imports(path) if m.startswith(("torch.distributed", "verl.config", "verl.trainer"))]


def test_no_file_is_called_utils() -> None:
    names = [p.relative_to(ROOT).as_posix() for p in PACKAGE.rglob("*") if re.search(r"util|helper|misc", p.stem)]
    assert names == ["verl/utils"]


def registries() -> list[tuple[str, Registry]]:
    found = []
    for path in FILES:
        for node in tree_of(path).body:
            value = getattr(node, "value", None)
            if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "Registry":
                target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
                assert isinstance(target, ast.Name)
                found.append((target.id, getattr(importlib.import_module(name_of(path)), target.id)))
    return found


def test_registry_entries_load() -> None:
    found = registries()
    assert {"ALGORITHMS", "REWARDS", "ROLLOUT_ENGINES", "TRACKERS"} <= {name for name, _ in found}
    for _, registry in found:
        assert all(callable(registry.load(name)) for name in registry)


def registry(name: str) -> Registry:
    return dict(registries())[name]


def test_every_algorithm_has_source_page_test_and_example() -> None:
    examples = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.yaml"))
    for name, entry in registry("ALGORITHMS").items():
        module = ROOT / (entry.partition(":")[0].replace(".", "/") + ".py")
        assert "Source: " in module.read_text(encoding="utf-8"), module
        assert (ROOT / "docs" / "algorithms" / f"{name}.md").is_file()
        assert (ROOT / "tests" / "algorithms" / f"test_{module.stem}.py").is_file()
        assert re.search(rf"algorithm:\n  name: {name}\n", examples), f"no example trains with {name}"


def test_nothing_asks_for_an_algorithm_or_an_engine_by_name() -> None:
    names = {*registry("ALGORITHMS"), *registry("ROLLOUT_ENGINES")}
    for path in FILES:
        compared = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Compare | ast.MatchValue)]
        words = {n.value for node in compared for n in ast.walk(node) if isinstance(n, ast.Constant)}
        assert not {word for word in words if isinstance(word, str)} & names, path


@pytest.mark.parametrize("name, page", [("REWARDS", "rewards.md"), ("ROLLOUT_ENGINES", "rollout.md")])
def test_every_entry_is_on_its_page(name: str, page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert [e for e in registry(name) if f"\n**{e}** " not in text and f"\n## {e}\n" not in text] == []


def test_every_module_has_a_test_file() -> None:
    missing = []
    for path in MODULES:
        place = path.relative_to(PACKAGE)
        test = ROOT / "tests" / place.with_name(f"test_{place.name}")
        if not test.is_file() and place.name != "__main__.py":
            missing.append(place.with_suffix("").as_posix())
    assert set(missing) - WITHOUT_TEST_FILE == set()
    assert {path.relative_to(PACKAGE).with_suffix("").as_posix() for path in MODULES} >= WITHOUT_TEST_FILE


def test_no_module_imports_itself_through_others() -> None:
    """Imports for types alone count too: a circle is two things that should be one, or three."""
    names = {name_of(path) for path in MODULES}
    graph = {name_of(path): {name for name in imports(path) if name in names} - {name_of(path)} for path in MODULES}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < MAX_FILE_LINES
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES, f"{path}: {node.name}"


@cache
def classes() -> dict[str, ast.ClassDef]:
    return {node.name: node for path in FILES for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)}


def base_names(node: ast.ClassDef) -> list[str]:
    plain = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return [base.id if isinstance(base, ast.Name) else getattr(base, "attr", "") for base in plain]


@cache
def protocol_methods() -> frozenset[str]:
    protocols = [node for node in classes().values() if "Protocol" in base_names(node)]
    return frozenset(name for node in protocols for name in documented_methods(node.name))


@cache
def documented_methods(name: str) -> frozenset[str]:
    """Methods of class ``name``, and of those that it inherits from, that have a docstring."""
    node = classes().get(name)
    if node is None:
        return frozenset()
    own = {m.name for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(m)}
    return frozenset(own).union(*(documented_methods(base) for base in base_names(node)))


def undocumented(body: list[ast.stmt], known: frozenset[str], where: str) -> Iterator[str]:
    """Public functions, classes and methods without a docstring, their own or the one of what they override."""
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node) and node.name not in known:
            yield f"{where}.{node.name}"
        if isinstance(node, ast.ClassDef):
            inherited = documented_methods(node.name) | protocol_methods()
            yield from undocumented(node.body, inherited, f"{where}.{node.name}")


def test_whatever_is_public_has_a_docstring() -> None:
    assert [path for path in MODULES if not ast.get_docstring(tree_of(path))] == []
    missing = [name for path in FILES for name in undocumented(tree_of(path).body, frozenset(), name_of(path))]
    assert missing == []


def test_a_missing_docstring_would_be_seen() -> None:
    source = "def f(): ...\nclass A:\n    'Text.'\n    def g(self): ...\n    def _h(self): ...\n"
    assert list(undocumented(ast.parse(source).body, frozenset(), "m")) == ["m.f", "m.A.g"]


def test_library_code_prints_nothing() -> None:
    for path in FILES:
        calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
        assert not [c for c in calls if isinstance(c.func, ast.Name) and c.func.id in ("print", "breakpoint")], path


def test_config_has_few_keys_and_each_is_explained() -> None:
    keys = reference().all_keys()
    assert len(keys) == len(set(keys)) < MAX_CONFIG_KEYS
    assert "actor.optim.lr" in keys and "algorithm.correction.cap" in keys and "rollout.block_size" in keys
    rows = re.findall(r"^\| `(\S+)` \| .+ \| .+ \| (.*) \|$", reference().page(), re.MULTILINE)
    assert {name for name, _ in rows} == set(keys)
    assert [name for name, meaning in rows if len(meaning) < 10] == []


def test_config_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == reference().page(), "run `make docs`"
