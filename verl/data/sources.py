"""Files and data sets to rows: plain Python mappings, each with the place it came from.

In: a name, a path, rows in Python, or a list of these. Out: ``SourceRow``s, one by one, in order. Knows which columns
hold the prompt only to label gym questions; tokens and limits are none of its business.

Every file is read by itself and its rows joined as Python values, so files may differ in columns, in optional nested
fields and in types. A line that can't be parsed is an error naming file and line, not a skipped row: a run that
trained on half a file because the download broke looks like any other run.
"""

from __future__ import annotations

import codecs
import glob
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import parse_qsl

from verl.common.errors import ConfigError, DataError, did_you_mean
from verl.data import gym
from verl.data.config import DataConfig

ALLOWED = ".jsonl, .json, .parquet"
_OPTIONS = {"name", "revision", "split"}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_NAMED_PROBLEMS = 5


@dataclass(frozen=True)
class SourceRow:
    """One row. ``source``: the file, folder or data set; ``where``: the row in it, for messages ("a.jsonl:17")."""

    source: str
    where: str
    values: dict[str, Any]


def read_rows(source: Any, config: DataConfig, key: str) -> Iterator[SourceRow]:
    """The rows of ``source``, in order, read as they are asked for.

    source  str     a file, a pattern, a folder saved by ``datasets``, a hub name, ``gym:<task>``; options follow a
                    ``?``: ``openai/gsm8k?name=main&split=test``, ``gym:chain_sum?size=500&seed=1``
            Path    a file or folder
            list    rows (mappings), or several sources to be joined
            datasets.Dataset, or a DatasetDict of one split
    key     the configuration key that ``source`` came from, for messages
    Raises DataError naming key and file when something is missing, unreadable, empty or of a kind not known;
    ConfigError for None and for options that aren't there.
    """
    if source is None:
        raise ConfigError(f"{key} names no data: give a file, a folder, the name of a data set or gym:<task>")
    if isinstance(source, Path):
        return _read_path(source, {}, key)
    if isinstance(source, str):
        return _read_name(source, config, key)
    if isinstance(source, list | tuple):
        if all(isinstance(entry, Mapping) for entry in source):
            return _number(source, "rows", "rows[{}]")
        return (row for entry in source for row in read_rows(entry, config, key))
    return _read_dataset(source, "dataset", {}, key)


def read_all(source: Any, config: DataConfig, key: str, max_rows: int | None) -> list[SourceRow]:
    """The first ``max_rows`` rows of ``source``, or all. Raises as ``read_rows``, and DataError when there is none."""
    rows = list(islice(read_rows(source, config, key), max_rows))
    if not rows:
        raise DataError(f"{key}: the data set is empty")
    return rows


def raise_problems(key: str, problems: list[str], total: int, advice: str) -> NoReturn:
    """A DataError that counts ``problems`` among ``total`` rows and spells out the first few."""
    more = f"\n  and {len(problems) - _NAMED_PROBLEMS} more" if len(problems) > _NAMED_PROBLEMS else ""
    listed = "\n  ".join(problems[:_NAMED_PROBLEMS])
    raise DataError(f"{key}: {len(problems)} of {total} rows can't be used. {advice}\n  {listed}{more}")


def _read_name(source: str, config: DataConfig, key: str) -> Iterator[SourceRow]:
    name, _, query = source.partition("?")
    if name.startswith("gym:"):
        return _read_gym(name, _parse_query(query, source, key), config, key)
    if os.path.lexists(source):
        return _read_path(Path(source), {}, key)
    options = _parse_query(query, source, key)
    if unknown := sorted(options.keys() - _OPTIONS):
        hint = did_you_mean(unknown[0], _OPTIONS)
        raise ConfigError(f"{key}: unknown option {unknown[0]!r} in {source!r}{hint}. Known: {sorted(_OPTIONS)}")
    if os.path.lexists(name):
        return _read_path(Path(name), options, key)
    if "*" in name or "[" in name:
        return _read_pattern(name, key)
    looks_like_file = name.startswith((".", "/", "~")) or Path(name).suffix in READERS
    if looks_like_file or not _HUB_NAME.fullmatch(name):
        raise DataError(f"{key}: no such file or folder: {name!r}{_nearest_file(Path(name))}")
    return _read_hub(name, options, key)


def _read_path(path: Path, options: dict[str, str], key: str) -> Iterator[SourceRow]:
    if os.path.isdir(path):
        return _read_folder(path, options, key)
    if not os.path.exists(path):
        raise DataError(f"{key}: no such file or folder: '{path}'{_nearest_file(path)}")
    if options:
        raise ConfigError(f"{key}: {sorted(options)} are options of data sets; '{path}' is a file")
    if path.suffix not in READERS:
        raise DataError(f"{key}: can't read '{path}': its name ends in {path.suffix!r}, allowed are {ALLOWED}")
    return _guarded(path, key)


def _guarded(path: Path, key: str) -> Iterator[SourceRow]:
    import pyarrow

    count = 0
    try:
        for where, values in READERS[path.suffix](path, key):
            count += 1
            yield SourceRow(str(path), where, plain(values))
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise DataError(f"{key}: can't read '{path}': {error}") from error
    if not count:
        raise DataError(f"{key}: '{path}' holds no rows")


def _read_jsonl(path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    problems: list[str] = []
    lines = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip(codecs.BOM_UTF8 + b" \t\r\n"):
                continue
            lines += 1
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:  # text of another encoding is a ValueError too
                problems.append(f"{path}:{number}: {error}")
                continue
            if isinstance(row, dict):
                yield f"{path}:{number}", row
            else:
                problems.append(f"{path}:{number}: a row must be a JSON object, got {type(row).__name__}")
    if problems:
        raise_problems(key, problems, lines, "Mend or remove these lines:")


def _read_json(path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        hint = ". One object a line? Then name it .jsonl" if "Extra data" in str(error) else ""
        raise DataError(f"{key}: '{path}' isn't JSON: {error}{hint}") from error
    if not isinstance(rows, list):
        raise DataError(f"{key}: '{path}' must hold a list of objects, got {type(rows).__name__}")
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{key}: {path}[{index}] must be a JSON object, got {type(row).__name__}")
        yield f"{path}[{index}]", row


def _read_parquet(path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow.parquet

    index = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield f"{path}[{index}]", row
                index += 1


READERS: dict[str, Callable[[Path, str], Iterator[tuple[str, dict[str, Any]]]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}


def _read_pattern(pattern: str, key: str) -> Iterator[SourceRow]:
    paths = sorted(glob.glob(pattern, recursive=True))
    if not paths:
        raise DataError(f"{key}: no file matches {pattern!r}")
    return (row for path in paths for row in _read_path(Path(path), {}, key))


def _read_folder(path: Path, options: dict[str, str], key: str) -> Iterator[SourceRow]:
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise DataError(f"{key}: can't read the folder '{path}': {error}") from error
    if not {"state.json", "dataset_dict.json"} & set(names):
        raise DataError(
            f"{key}: '{path}' is a folder, but not one saved by datasets (save_to_disk). Name its files, or a pattern "
            f"such as '{path}/train*.parquet'. It holds: {', '.join(names[:10]) or 'nothing'}"
        )
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:
        raise DataError(f"{key}: can't load '{path}': {type(error).__name__}: {error}") from error
    return _read_dataset(loaded, str(path), options, key)


def _read_hub(name: str, options: dict[str, str], key: str) -> Iterator[SourceRow]:
    import datasets

    try:
        loaded = datasets.load_dataset(name, options.get("name"), revision=options.get("revision"))
    except Exception as error:
        raise DataError(
            f"{key}: {name!r} is no file or folder here, and loading it from the hub failed: "
            f"{type(error).__name__}: {error}"
        ) from error
    return _read_dataset(loaded, name, options, key)


def _read_dataset(loaded: Any, name: str, options: dict[str, str], key: str) -> Iterator[SourceRow]:
    import datasets

    if isinstance(loaded, datasets.DatasetDict):
        splits = sorted(loaded)
        split = options.get("split", splits[0] if len(splits) == 1 else None)
        if split not in loaded:
            said = f"no split {split!r}" if split else "several splits"
            raise DataError(f"{key}: {name!r} has {said}; choose one with {name}?split=..., of {', '.join(splits)}")
        return _number(loaded[split].with_format(None), name, f"{name}[{split}][{{}}]")
    if isinstance(loaded, datasets.Dataset):
        return _number(loaded.with_format(None), name, f"{name}[{{}}]")
    raise DataError(
        f"{key}: can't read rows from {type(loaded).__name__}. Allowed: a name, a path, a list of mappings, a "
        "datasets.Dataset, or a list of these"
    )


def _read_gym(name: str, options: dict[str, str], config: DataConfig, key: str) -> Iterator[SourceRow]:
    task = name.removeprefix("gym:")
    for index, entry in enumerate(gym.entries(task, options, key)):
        values = {"task": task, "entry": entry, config.prompt_key: entry["question"]}
        if config.ground_truth_key is not None:
            values[config.ground_truth_key] = gym.ground_truth(entry)
        yield SourceRow(name, f"{name}[{index}]", values)


def _number(rows: Any, source: str, pattern: str) -> Iterator[SourceRow]:
    for index, row in enumerate(rows):
        yield SourceRow(source, pattern.format(index), plain(row))


def _parse_query(query: str, source: str, key: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True)) if query else {}
    except ValueError as error:
        raise ConfigError(f"{key}: the options of {source!r} must read ?name=value&name=value: {error}") from error


def _nearest_file(path: Path) -> str:
    folder = path.parent
    try:
        return did_you_mean(path.name, [entry.name for entry in folder.iterdir()])
    except OSError:
        return f"; the folder '{folder}' doesn't exist or can't be read"


def plain(value: Any) -> Any:
    """``value`` with arrays, tuples and mappings inside it as lists and dicts of Python values."""
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if type(value).__module__ == "numpy":
        return plain(value.tolist())
    return value
