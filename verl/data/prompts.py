"""Rows to prompts: find the columns, encode, hold the length limit, and say what became of every row.

In: a source, the ``data`` section, a tokenizer. Out: a ``PromptDataset`` whose rows carry their ids, and a report of
the rows that were left out. Knows nothing of the order in which rows are visited.

The limit is measured on the very ids that go to rollout, on one path for text, messages, system prompts and tools.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

from verl.common.errors import DataError, did_you_mean
from verl.data.chat import Prompt, check_prompt, encode_prompt
from verl.data.config import DataConfig
from verl.data.gathering import OVERLONG, Gathering, Incident, LoadReport, name_some
from verl.data.sources import SourceRow, read_all
from verl.data.vocabulary import warn_of_unknown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MISSING = object()
OVERLONG_ADVICE = "Raise data.max_prompt_tokens or set data.overlong_prompts to drop, left or right:"


@dataclass(frozen=True)
class PromptRow:
    """One prompt.

    row_id        index among all rows of all sources, counted before any is left out
    prompt        as the data set has it; ``encode_prompt`` of it gives ``prompt_ids`` (unless cut to the limit)
    prompt_ids    what the model reads
    ground_truth  of any type; None when ``data.ground_truth_key`` is null
    extra         the other columns of the row; a column that only other rows have is None
    source        the file or data set it came from
    """

    row_id: int
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    ground_truth: Any
    extra: dict[str, Any]
    source: str

    def as_mapping(self) -> dict[str, Any]:
        """What a reward may ask for by name: the other columns, and over them prompt, ground_truth, row_id, source."""
        own = {"prompt": self.prompt, "ground_truth": self.ground_truth, "row_id": self.row_id, "source": self.source}
        return {**self.extra, **own}


class PromptDataset(Sequence[PromptRow]):
    """Prompts in the order of their sources, and the report of how they were loaded."""

    def __init__(self, rows: Sequence[PromptRow], report: LoadReport) -> None:
        self._rows = tuple(rows)
        self.report = report

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> PromptRow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[PromptRow, ...]: ...
    def __getitem__(self, index: int | slice) -> PromptRow | tuple[PromptRow, ...]:
        return self._rows[index]

    def without(self, held_out: Sequence[PromptRow]) -> PromptDataset:
        """These rows less those whose ids are a prompt of ``held_out``. Raises DataError when nothing is left."""
        taken = {row.prompt_ids for row in held_out}
        kept = [row for row in self._rows if row.prompt_ids not in taken]
        if not kept:
            raise DataError(f"all {len(self)} rows of data.train are in data.val too (data.exclude_val)")
        out = tuple(
            Incident(row.row_id, f"row {row.row_id} of {row.source}", "is in data.val")
            for row in self._rows
            if row.prompt_ids in taken
        )
        dropped = {**self.report.dropped, "also in data.val": out} if out else self.report.dropped
        return PromptDataset(kept, replace(self.report, rows_kept=len(kept), dropped=dropped))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all row ids and prompt ids: a resumed run has the same one, or it isn't on the same data."""
        digest = hashlib.sha256()
        for row in self._rows:
            digest.update(repr((row.row_id, row.prompt_ids)).encode())
        return digest.hexdigest()[:16]


def load_prompts(
    source: Any,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    key: str = "data.train",
    max_rows: int | None = None,
) -> PromptDataset:
    """Read and encode every prompt of ``source`` (see ``read_rows`` for what it may be).

    key       the configuration key that ``source`` came from, for messages
    max_rows  use only the first so many rows
    Raises DataError, naming key and rows: a column that isn't there, prompts that are no prompts, no ground truth,
    nothing left. All such rows are counted and the first few named, at once.
    """
    rows = read_all(source, config, key, max_rows)
    columns = dict.fromkeys(name for row in rows for name in row.values)
    _check_columns(columns, config, rows[0].source)
    return _encode_rows(rows, list(columns), config, tokenizer, key)


def shared_prompts(train: Sequence[PromptRow], val: Sequence[PromptRow]) -> list[int]:
    """``row_id`` of each validation row whose ids are also a training prompt: a score on these says little."""
    seen = {row.prompt_ids for row in train}
    return [row.row_id for row in val if row.prompt_ids in seen]


def require_column(row: SourceRow, column: str, key: str) -> Any:
    """The value in ``column``; a dot reaches into a nested one. Raises DataError naming ``key`` when there is none."""
    value = _lookup(row.values, column)
    if value is _MISSING or value is None:
        said = "is null" if value is None else "isn't in the row"
        raise DataError(f"column {column!r} ({key}) {said}; the row has {_listed(row.values)}")
    return value


def cut_prompt(ids: tuple[int, ...], config: DataConfig) -> tuple[int, ...]:
    """The first or the last ``data.max_prompt_tokens`` ids, as ``data.overlong_prompts`` says."""
    limit = config.max_prompt_tokens
    return ids[-limit:] if config.overlong_prompts == "left" else ids[:limit]


def _encode_rows(
    rows: Sequence[SourceRow], columns: list[str], config: DataConfig, tokenizer: PreTrainedTokenizerBase, key: str
) -> PromptDataset:
    gathering = Gathering[PromptRow](key, len(rows))
    limit = config.max_prompt_tokens
    for row_id, row in enumerate(rows):
        with gathering.judging(row_id, row):
            made = _make_row(row_id, row, columns, config, tokenizer)
            if gathering.must_cut(row_id, row, len(made.prompt_ids), limit, config.overlong_prompts):
                made = replace(made, prompt_ids=cut_prompt(made.prompt_ids, config))
            gathering.kept.append(made)
    report = gathering.report(OVERLONG_ADVICE)
    if not gathering.kept:
        first = name_some(report.dropped[OVERLONG])
        raise DataError(
            f"{key}: all {len(rows)} rows have prompts longer than data.max_prompt_tokens = {limit}. "
            f"Raise it, or set data.overlong_prompts to left or right. First rows: {first}"
        )
    warn_of_unknown(tokenizer, key, ((row.row_id, row.source, row.prompt_ids) for row in gathering.kept))
    return PromptDataset(gathering.kept, report)


def _make_row(
    row_id: int, row: SourceRow, columns: list[str], config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> PromptRow:
    prompt = check_prompt(require_column(row, config.prompt_key, "data.prompt_key"))
    truth = config.ground_truth_key and require_column(row, config.ground_truth_key, "data.ground_truth_key")
    prompt_ids = tuple(encode_prompt(tokenizer, prompt, config))
    if not prompt_ids:
        raise DataError("the prompt has no tokens")
    taken = {config.prompt_key, config.ground_truth_key}
    extra = {name: row.values.get(name) for name in columns if name not in taken}
    return PromptRow(row_id, prompt, prompt_ids, truth, extra, row.source)


def _lookup(values: dict[str, Any], column: str) -> Any:
    if column in values:
        return values[column]
    head, dot, rest = column.partition(".")
    inner = values.get(head)
    return _lookup(inner, rest) if dot and isinstance(inner, dict) else _MISSING


def _check_columns(columns: dict[str, None], config: DataConfig, source: str) -> None:
    for key, column in (("prompt_key", config.prompt_key), ("ground_truth_key", config.ground_truth_key)):
        if column is not None and column not in columns and column.partition(".")[0] not in columns:
            advice = " (null if the reward needs none)" if key == "ground_truth_key" else ""
            raise DataError(
                f"data.{key}: no column {column!r} in {source!r}{did_you_mean(column, columns)}. "
                f"It has {_listed(columns)}: set data.{key} to one of them{advice}"
            )


def _listed(columns: dict[str, Any]) -> str:
    return ", ".join(map(repr, columns)) or "no columns"
