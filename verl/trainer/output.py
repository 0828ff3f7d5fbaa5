"""Files that a command is told to write: tried before its work, written whole or not at all, faults in one line.

In: a path, and the word of the command line that named it. Knows nothing of what is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from verl.common.errors import ConfigError
from verl.common.files import try_writing, write_text


def prepare_output(path: Path, source: str | Path = "", option: str = "--out") -> None:
    """Raise ConfigError, before any work, when ``path`` can't be written, or is ``source``, which is read.

    option  the word of the command line that named ``path``, for the message
    """
    try:
        if _is_replaced(path):
            try_writing(path.resolve())
    except OSError as error:
        raise _cant_be_written(path, option, error) from error
    if path.is_dir():
        raise ConfigError(f"{option} {str(path)!r} is a folder: name a file")
    if path.exists() and Path(source).is_file() and path.samefile(source):
        raise ConfigError(f"{option} {str(path)!r} is the file that the prompts come from: name another one")


def write_output(path: Path, text: str, option: str = "--out") -> None:
    """Write ``text`` to ``path``, whole: an older file stays where that fails. Raises ConfigError naming ``option``.

    What is there and no file, such as a pipe, is written to as it is.
    """
    try:
        if _is_replaced(path):
            write_text(path.resolve(), text)
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _cant_be_written(path, option, error) from error


def json_lines(rows: Iterable[Mapping[str, object]]) -> Iterable[str]:
    """A line of JSON for each of ``rows``, with its end.

    What JSON can't hold is written as text; a lone surrogate, which UTF-8 can't hold, as JSON's escape of it.
    """
    for row in rows:
        yield (_json(row) + "\n").encode("utf-8", "backslashreplace").decode()


def _is_replaced(path: Path) -> bool:
    return path.is_file() or not path.exists()


def _cant_be_written(path: Path, option: str, error: OSError) -> ConfigError:
    why = error.strerror or error  # without the name of the file aside
    return ConfigError(f"{option} {str(path)!r} can't be written: {why}. Name a file elsewhere")


def _json(row: Mapping[str, object]) -> str:
    try:
        return json.dumps(row, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that are no text, a value within itself
        return json.dumps({key: _jsonable(value) for key, value in row.items()}, ensure_ascii=False, default=str)


def _jsonable(value: object) -> object:
    try:
        json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):
        return repr(value)
    return value
