"""Files that are either whole or absent: write aside, fsync, rename; and a manifest that says what a folder holds.

Knows nothing of what the files mean.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
HASH_LIMIT_BYTES = 16 * 2**30
"""Contents hashed by one ``verify_manifest`` unless told otherwise: seconds on a machine that could hold them."""

_IN_THIS_PROCESS = threading.Lock()
_OUT_OF_SPACE = re.compile(
    r"no space left|file too large|quota exceeded|os error (27|28|122)\b|file write failed|iostream error|"
    r"inline_container.* unexpected pos",
    re.IGNORECASE,
)


def fsync_dir(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    _fsync(folder)


def fsync_tree(folder: Path) -> None:
    """Make every file and folder under ``folder`` durable."""
    for root, _, names in os.walk(folder):
        for name in names:
            _fsync(Path(root) / name)
        _fsync(Path(root))


def write_text(path: Path, text: str) -> None:
    """``write_bytes`` of ``text`` in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Replace ``path`` with ``data`` atomically: a reader sees the old content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = _aside(path)
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    fsync_dir(path.parent)


def try_writing(path: Path) -> None:
    """Raise OSError where ``write_bytes`` to ``path`` would at its first byte; makes its folder, and leaves no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = _aside(path)
    try:
        aside.write_bytes(b".")
    finally:
        aside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """``write_text`` of ``value`` as indented JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=True) + "\n")


@contextmanager
def folder_written_aside(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder beside ``target``; rename it to ``target`` when the block ends well, else remove it.

    Its files can be read and written by whom the umask lets, also where a library makes them its owner's alone.
    Everything in it is fsynced before the rename and the parent's entry after it. ``target`` must not exist, unless
    ``replace``: then it is called ``<name>.old`` until the new one stands, so that one of the two is always there.
    """
    aside, displaced = _aside(target), displaced_name(target)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        _share_as_folder(aside)
        fsync_tree(aside)
        if replace and target.exists():
            remove_folder(displaced)
            os.rename(target, displaced)
        os.rename(aside, target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        if replace and displaced.exists() and not target.exists():
            os.rename(displaced, target)
        raise
    fsync_dir(target.parent)
    if replace:
        remove_folder(displaced)


def _share_as_folder(folder: Path) -> None:
    """Give the files of a folder that was just made the folder's own permissions: those that the umask left."""
    mode = folder.stat().st_mode & 0o666
    for name in _files_under(folder):
        with suppress(OSError):  # of file systems without permissions
            (folder / name).chmod(mode)


def displaced_name(target: Path) -> Path:
    """Where ``folder_written_aside(target, replace=True)`` keeps the old folder for the moment between two renames."""
    return target.with_name(target.name + ".old")


def remove_folder(folder: Path) -> None:
    """Remove ``folder`` so that nobody ever sees half of it under its name; one that isn't there is fine."""
    aside = _aside(folder)
    try:
        os.rename(folder, aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(folder: Path) -> list[str]:
    """Remove what writers that died left aside in ``folder``; returns the names.

    Only for a caller who holds ``locked(folder)`` and so knows that no living writer is in it.
    """
    leftovers = [path for path in folder.glob(".*.tmp") if re.fullmatch(r"\..+\.\d+\.tmp", path.name)]
    for path in leftovers:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return sorted(path.name for path in leftovers)


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Wait for, then hold, the right to write in ``folder``, among processes and threads.

    The system drops the lock when its holder dies, however it dies. Yields False where the file system has no locks:
    then nothing is held.
    """
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with _IN_THIS_PROCESS, (folder / ".lock").open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX)  # not flock: a forked child that outlives its parent must not keep it
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            yield False
            return
        yield True


def write_manifest(folder: Path) -> int:
    """Record the size and the content hash of every file under ``folder``; returns their bytes."""
    names = sorted(_files_under(folder) - {MANIFEST})
    with ThreadPoolExecutor() as pool:
        hashes = list(pool.map(lambda name: content_hash(folder / name), names))
    sizes = [(folder / name).stat().st_size for name in names]
    files = {name: {"bytes": size, "blake2b": digest} for name, size, digest in zip(names, sizes, hashes, strict=True)}
    write_json(folder / MANIFEST, {"version": 1, "files": files})
    return sum(sizes)


def verify_manifest(folder: Path, hash_limit_bytes: int | None = HASH_LIMIT_BYTES) -> str | None:
    """What is wrong with ``folder`` by its own manifest, or None when it is whole.

    Every file's presence and size is checked; contents are hashed from the smallest file up while their sum stays
    within ``hash_limit_bytes`` (None: all).
    """
    try:
        sizes, hashes = _read_manifest(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} is missing or unreadable ({type(error).__name__}: {error})"
    for name, size in sizes.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes, not {size}"
    return _first_changed(folder, hashes, _within_budget(sizes, hash_limit_bytes))


def manifest_bytes(folder: Path) -> int:
    """Bytes of the files that the manifest of ``folder`` lists; 0 when it can't be read."""
    try:
        return sum(_read_manifest(folder)[0].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


def content_hash(path: Path) -> str:
    """Hexadecimal BLAKE2b (128 bits) of a file."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(2**22):
            digest.update(chunk)
    return digest.hexdigest()


def free_bytes(folder: Path) -> int:
    """Bytes that can be written under ``folder``, or under its nearest parent that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def is_out_of_space(error: BaseException) -> bool:
    """Whether ``error``, or what caused it, says that the storage is full or a size limit was hit.

    Writers in other languages (safetensors, torch's zip writer) give no errno, so their words count too.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        if _OUT_OF_SPACE.search(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _read_manifest(folder: Path) -> tuple[dict[str, int], dict[str, str]]:
    files: Mapping[str, Mapping[str, Any]] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    if not files:
        raise ValueError("it lists no file")
    return (
        {name: int(entry["bytes"]) for name, entry in files.items()},
        {name: str(entry["blake2b"]) for name, entry in files.items()},
    )


def _within_budget(sizes: Mapping[str, int], limit: int | None) -> list[str]:
    chosen, total = [], 0
    for name in sorted(sizes, key=lambda n: (sizes[n], n)):
        total += sizes[name]
        if limit is not None and total > limit:
            break
        chosen.append(name)
    return chosen


def _first_changed(folder: Path, hashes: Mapping[str, str], names: list[str]) -> str | None:
    def check(name: str) -> str | None:
        try:
            return None if content_hash(folder / name) == hashes[name] else f"the content of {name} has changed"
        except OSError as error:
            return f"{name} can't be read ({error})"

    with ThreadPoolExecutor() as pool:
        return next((wrong for wrong in pool.map(check, names) if wrong), None)


def _files_under(folder: Path) -> set[str]:
    return {(Path(root) / name).relative_to(folder).as_posix() for root, _, names in os.walk(folder) for name in names}


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
