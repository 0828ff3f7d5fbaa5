"""The package as it is built and installed: version, licence, data files, entry points."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import verl
from verl.utils.profiler import VerlProfiler

ROOT = Path(__file__).resolve().parent.parent


def test_version_is_one_that_pip_orders() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", verl.__version__)


@pytest.mark.parametrize("start", [["-m", "verl"], ["-c", "from verl.cli import main; main()"]])
def test_version_from_the_command_line(start: list[str]) -> None:
    done = subprocess.run([sys.executable, *start, "--version"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, verl.__version__, "")


def test_command_is_installed() -> None:
    (command,) = entry_points(group="console_scripts", name="verl")
    assert command.value == "verl.cli:main"


def test_profiler_has_its_short_path() -> None:
    from verl.observe import profiler

    assert VerlProfiler is profiler.VerlProfiler


def test_licence_is_apache_2_whole() -> None:
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


def test_changelog_has_sections() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[(Unreleased|\d+\.\d+\.\d+)\]", text, re.MULTILINE)
    kinds = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    assert kinds and kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "verl", tmp_path / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    command = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    done = subprocess.run([sys.executable, "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "verl").rglob("*.py")}
    recipes = {p.relative_to(ROOT).as_posix() for p in (ROOT / "verl" / "recipes").iterdir() if p.is_file()}
    assert {name for name in names if name.startswith("verl/")} == sources | recipes | {"verl/py.typed"}
    assert {name.partition("/")[0] for name in names} == {"verl", f"verl-{verl.__version__}.dist-info"}
    assert f"\nVersion: {verl.__version__}\n" in metadata and "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "\nRequires-Python: <3.14,>=3.10\n" in metadata
