"""Checkpoints of a run: each one complete or absent, the newest complete one found again after any death.

In come callables that each write one part (a model, an optimizer, ...) and a JSON state; out come folders
``<run>/checkpoints/step_000004``. What a part or the state means is its writer's business.

    checkpoints/latest                   the name of the folder that was committed last
    checkpoints/step_000004/manifest.json  size and content hash of every other file
    checkpoints/step_000004/state.json     step, versions, state
    checkpoints/step_000004/<part>/...

A folder is written aside, fsynced, renamed; then the pointer moves; then older ones are pruned.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import verl
from verl.common import files
from verl.common.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
Writer: TypeAlias = Callable[[Path], object]

FOLDER = "checkpoints"
POINTER = "latest"
STATE = "state.json"
_STEP = re.compile(r"step_(\d+)(\.old)?")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: ``state`` as it was given to ``save``, ``versions`` of what wrote it."""

    path: Path
    step: int
    state: Mapping[str, Any]
    versions: Mapping[str, str]

    def part(self, name: str) -> Path:
        """The folder of a part. Raises CheckpointError naming the parts that there are."""
        folder = self.path / name
        if not folder.is_dir():
            raise CheckpointError(f"{self.path} holds no part {name!r}; it holds: {', '.join(self.parts) or 'none'}")
        return folder

    @property
    def parts(self) -> list[str]:
        """Names of the folders that hold files, as ``role/part``."""
        found = {path.relative_to(self.path).parts[:-1][:2] for path in self.path.rglob("*") if path.is_file()}
        return sorted("/".join(parts) for parts in found if parts)


def open_checkpoint(folder: Path, hash_limit_bytes: int | None = files.HASH_LIMIT_BYTES) -> Checkpoint:
    """The checkpoint in ``folder``. Raises CheckpointError saying what is missing, cut off or changed."""
    if wrong := files.verify_manifest(folder, hash_limit_bytes):
        raise CheckpointError(f"{folder} is no complete checkpoint: {wrong}")
    try:
        saved = json.loads((folder / STATE).read_text(encoding="utf-8"))
        return Checkpoint(folder, int(saved["step"]), saved["state"], saved["versions"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} is no complete checkpoint: {STATE}: {error!r}") from error


class CheckpointStore:
    """The checkpoints of one run folder.

    folder  the run folder (``trainer.output_dir``)
    keep    complete checkpoints that stay after a save (``trainer.keep_checkpoints``); None keeps all
    """

    def __init__(self, folder: Path, keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise ConfigError(f"trainer.keep_checkpoints must be >= 1, or null to keep all, got {keep}")
        self.folder, self.keep = Path(folder) / FOLDER, keep

    def save(
        self,
        step: int,
        parts: Mapping[str, Writer],
        state: Mapping[str, JSON],
        estimated_bytes: int | None = None,
    ) -> Path:
        """Commit the checkpoint of ``step`` and return its folder; one of the same step is replaced.

        parts            name such as ``actor/model`` -> what writes that folder, which is empty when it is called
        estimated_bytes  what it will take on disk at least, where the largest one there took less
        Raises CheckpointError when there isn't room or a write fails; what was there before is then untouched.
        """
        _check_parts(parts)
        _check_json(state, "state")
        target = self.folder / f"step_{step:06d}"
        needed = 0
        try:
            with files.locked(self.folder) as is_locked:
                if is_locked and (names := files.remove_leftovers(self.folder)):
                    log.warning("removed what dead writers left in %s: %s", self.folder, ", ".join(names))
                needed = max([estimated_bytes or 0, *(files.manifest_bytes(path) for path in self._folders())])
                self.check_room(step, needed)
                with files.folder_written_aside(target, replace=True) as aside:
                    _write(aside, step, parts, state)
                files.write_text(self.folder / POINTER, target.name + "\n")
                self._prune(target)
        except Exception as error:
            if files.is_out_of_space(error):
                raise self._no_room(step, needed) from error
            if isinstance(error, OSError):
                raise CheckpointError(
                    f"the checkpoint of step {step} can't be written in {self.folder}: {error}"
                ) from error
            raise
        return target

    def check_room(self, step: int, needed: int) -> None:
        """Raise CheckpointError when the disk has no ``needed`` bytes for the checkpoint of ``step``."""
        if needed > files.free_bytes(self.folder):
            raise self._no_room(step, needed)

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint, or None where there is none at all; a warning names each newer one that is
        damaged. Raises CheckpointError when all are, with the reason of the newest.

        Newest is what the pointer names, then older steps, then steps beyond it: those belong to a continuation that
        was given up when the run went back to an earlier step.
        """
        pointed = self._pointed()
        if pointed is not None and not (self.folder / pointed).is_dir():
            log.warning("%s names %s, which isn't there", self.folder / POINTER, pointed)
        damaged: list[CheckpointError] = []
        for folder in self._folders():
            try:
                return open_checkpoint(folder)
            except CheckpointError as error:
                log.warning("skipping checkpoint %s: %s", folder.name, error)
                damaged.append(error)
        if damaged:
            raise CheckpointError(f"none of the {len(damaged)} checkpoints in {self.folder} is whole: {damaged[0]}")
        return None

    def _folders(self) -> list[Path]:
        """Folders that claim to be checkpoints, newest first."""
        found = [(match, path) for path in self.folder.glob("step_*") if (match := _STEP.fullmatch(path.name))]
        pointer = _STEP.fullmatch(self._pointed() or "")
        last = int(pointer[1]) if pointer else None

        def age(item: tuple[re.Match[str], Path]) -> tuple[bool, int, bool]:
            step, is_displaced = int(item[0][1]), item[0][2] is not None
            return (last is not None and step > last, -step, is_displaced)

        return [path for _, path in sorted(found, key=age)]

    def _pointed(self) -> str | None:
        try:
            name = (self.folder / POINTER).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return name if _STEP.fullmatch(name) else None

    def _prune(self, newest: Path) -> None:
        """Leave ``newest`` and the ``keep - 1`` complete ones before it."""
        if self.keep is None:
            return
        left = self.keep - 1
        for folder in self._folders():
            if folder == newest:
                continue
            if left > 0 and files.verify_manifest(folder, hash_limit_bytes=0) is None:
                left -= 1
                continue
            try:
                files.remove_folder(folder)
            except OSError as error:
                log.warning("can't remove the old checkpoint %s: %s", folder, error)

    def _no_room(self, step: int, needed: int) -> CheckpointError:
        size = f"at least {needed:,}" if needed else "an unknown number of"
        return CheckpointError(
            f"no room for the checkpoint of step {step} in {self.folder}: it needs {size} bytes, "
            f"{files.free_bytes(self.folder):,} are free. Free some, lower trainer.keep_checkpoints "
            f"(now {'null' if self.keep is None else self.keep}) or set trainer.output_dir to a larger disk"
        )


def _write(folder: Path, step: int, parts: Mapping[str, Writer], state: Mapping[str, JSON]) -> None:
    for name, write in parts.items():
        (folder / name).mkdir(parents=True)
        write(folder / name)
        if not any(path.is_file() for path in (folder / name).rglob("*")):
            raise CheckpointError(
                f"part {name!r} of the checkpoint of step {step} wrote no file: is trainer.output_dir on storage that "
                "every worker shares?"
            )
    versions = {"verl": verl.__version__, **{name: version(name) for name in ("torch", "transformers")}}
    files.write_json(folder / STATE, {"step": step, "versions": versions, "state": state})
    files.write_manifest(folder)


def _check_parts(parts: Mapping[str, Writer]) -> None:
    for name in parts:
        path = PurePosixPath(name)
        assert path.parts and not path.is_absolute() and ".." not in path.parts, f"{name!r} is no name of a part"
        assert name not in (STATE, files.MANIFEST), f"{name!r} is taken"
        assert not any(parent.as_posix() in parts for parent in path.parents), f"{name!r} lies in another part"


def _check_json(value: Any, where: str) -> None:
    """JSON would turn an int key into text, and refuse or mangle the rest, when it is too late."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}: a checkpoint's state takes text keys only")
            _check_json(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_json(item, f"{where}[{index}]")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise CheckpointError(f"{where} is a {type(value).__name__}: a checkpoint's state takes JSON values only")


class _Absent:
    def __repr__(self) -> str:
        return "(not set)"


ABSENT = _Absent()
"""Stands for a key that one of two configs doesn't have."""


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ -> (old, new), ``ABSENT`` where one side has no such key.

    Numbers compare by value, but a boolean is no number; lists compare as wholes; NaN equals itself.
    """
    before, after = _flat(old), _flat(new)
    pairs = {key: (before.get(key, ABSENT), after.get(key, ABSENT)) for key in sorted({*before, *after})}
    return {key: pair for key, pair in pairs.items() if not _same(*pair)}


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, bool) != isinstance(b, bool):
        return False
    return bool(a == b) or (a != a and b != b)
