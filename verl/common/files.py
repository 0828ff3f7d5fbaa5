"""Files that are either whole or absent: write aside, fsync, rename.

Knows nothing of what the files mean.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def fsync_dir(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_tree(folder: Path) -> None:
    """Make every file and folder under ``folder`` durable."""
    for root, _, names in os.walk(folder):
        for name in names:
            handle = os.open(Path(root) / name, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        fsync_dir(Path(root))


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` with ``text`` atomically: a reader sees the old content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    fsync_dir(path.parent)


def write_json(path: Path, value: Any) -> None:
    """``write_text`` of ``value`` as indented JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=True) + "\n")


@contextmanager
def folder_written_aside(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``target``; rename it to ``target`` when the block ends well, else remove it.

    ``target`` must not exist. Everything in it is fsynced before the rename and the parent's entry after it.
    """
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        fsync_tree(aside)
        os.rename(aside, target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    fsync_dir(target.parent)
