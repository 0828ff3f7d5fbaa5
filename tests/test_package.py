"""The package as it is built and installed: version, licence, data files, entry points."""

from __future__ import annotations

import hashlib
import os
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


def built(folder: Path, how: str) -> Path:
    """The wheel that ``how`` of setuptools makes of a copy of the sources in ``folder``."""
    pytest.importorskip("setuptools", minversion="77")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "verl", folder / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    command = f"from setuptools import build_meta; build_meta.{how}('dist')"
    (folder / "dist").mkdir()
    done = subprocess.run([sys.executable, "-c", command], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def test_an_editable_install_is_found_from_the_folder_that_holds_the_checkout(tmp_path: Path) -> None:
    """There the checkout's own folder is called verl too: a namespace package, which wins over a hook of setuptools."""
    checkout = tmp_path / "verl"
    checkout.mkdir()
    with zipfile.ZipFile(built(checkout, "build_editable")) as archive:
        archive.extractall(tmp_path / "site")
    program = f"import site; site.addsitedir({str(tmp_path / 'site')!r}); import verl; print(verl.__file__)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", program]  # without the packages of this interpreter, verl among them
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == str(checkout / "verl" / "__init__.py"), found.stderr


def test_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    with zipfile.ZipFile(built(tmp_path, "build_wheel")) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "verl").rglob("*.py")}
    recipes = {p.relative_to(ROOT).as_posix() for p in (ROOT / "verl" / "recipes").iterdir() if p.is_file()}
    assert {name for name in names if name.startswith("verl/")} == sources | recipes | {"verl/py.typed"}
    assert {name.partition("/")[0] for name in names} == {"verl", f"verl-{verl.__version__}.dist-info"}
    assert f"\nVersion: {verl.__version__}\n" in metadata and "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "\nRequires-Python: <3.14,>=3.10\n" in metadata
