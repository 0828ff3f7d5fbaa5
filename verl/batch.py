"""The batch: rows of one step, as the only thing that crosses from one role to the next.

``FIELDS`` is the field table: what each column holds, who writes it, who reads it. A ragged column is stored
without padding (a jagged nested tensor) and keeps its true lengths; ``padded`` gives the [B, R] view in which
algorithms are written. Lengths are recorded by whoever made the tokens, never guessed from token ids.

Shape letters: B rows, R response tokens of the longest row, N tokens of all rows together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.common.errors import MissingField, ShapeError, did_you_mean
from verl.common.transfer import to_device


class FinishReason(IntEnum):
    """Why a response ended: a stop id or string, the length limit, or the engine gave up."""

    STOP = 0
    LENGTH = 1
    ABORT = 2

    @property
    def word(self) -> str:
        """As files say it: stop, length or abort."""
        return self.name.lower()


@dataclass(frozen=True)
class Field:
    """One column. ``shape``: "prompt" and "response" are ragged, "row" is [B]."""

    shape: Literal["prompt", "response", "row"]
    dtype: torch.dtype
    written_by: str
    read_by: str
    meaning: str


FIELDS: dict[str, Field] = {
    "prompt_ids": Field("prompt", torch.int64, "data", "rollout, engines", "token ids of the prompt"),
    "response_ids": Field("response", torch.int64, "rollout", "rewards, engines", "token ids of the response"),
    "response_mask": Field(
        "response", torch.bool, "rollout", "algorithms", "True where the policy sampled the token (tool output: False)"
    ),
    "rollout_log_probs": Field("response", torch.float32, "rollout", "algorithms", "log-prob under the sampler"),
    "old_log_probs": Field("response", torch.float32, "actor", "algorithms", "log-prob under the actor before updates"),
    "ref_log_probs": Field("response", torch.float32, "reference", "algorithms", "log-prob under the reference"),
    "values": Field("response", torch.float32, "critic", "algorithms", "expected return before each token"),
    "scores": Field("row", torch.float32, "rewards", "algorithms", "reward of the whole response"),
    "greedy_scores": Field(
        "row",
        torch.float32,
        "rewards",
        "algorithms",
        "score of a greedy response to the row's prompt, NaN if it failed",
    ),
    "is_scored": Field("row", torch.bool, "rewards", "algorithms", "False where the reward failed on the row"),
    "token_rewards": Field(
        "response", torch.float32, "algorithms", "algorithms", "reward a token, after the KL penalty"
    ),
    "advantages": Field("response", torch.float32, "algorithms", "losses", "advantage of each token"),
    "returns": Field("response", torch.float32, "algorithms", "losses", "regression target of the critic"),
    "row_id": Field("row", torch.int64, "data", "trainer", "index of the row in its data set"),
    "group_id": Field("row", torch.int64, "data", "algorithms", "responses of one prompt share it"),
    "pair_id": Field(
        "row", torch.int64, "data", "engines, losses", "a loss compares the rows that share it, so they stay together"
    ),
    "is_chosen": Field("row", torch.bool, "data", "losses", "True on a pair's better answer, or on a desirable one"),
    "kl_estimate": Field(
        "row",
        torch.float32,
        "reference",
        "losses",
        "KL of the policy from the reference, one number a step",
    ),
    "policy_version": Field("row", torch.int64, "rollout", "trainer", "weight version that sampled the row"),
    "finish_reason": Field("row", torch.int64, "rollout", "algorithms", "a FinishReason"),
}


class Batch:
    """Rows with columns from ``FIELDS`` and, per row, a plain mapping of what isn't a tensor.

    rows  one mapping a row: ``prompt``, ``ground_truth`` and whatever else the data set carries
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = list(rows)
        self._columns = TensorDict({}, batch_size=[len(self.rows)])

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, name: str) -> bool:
        return name in self._columns.keys()  # noqa: SIM118  # `in` the dict asks for rows

    @property
    def names(self) -> list[str]:
        """The columns written so far."""
        return sorted(str(name) for name in self._columns.keys())  # noqa: SIM118  # iterating the dict yields rows

    def __getitem__(self, name: str) -> Tensor:
        """A [B] column, or the [N] values of a ragged one. Raises MissingField naming the writer."""
        column = self._column(name)
        return _values(column) if column.is_nested else column

    def lengths(self, name: str) -> Tensor:
        """[B] int64 on the CPU: tokens of each row in a ragged column."""
        column = self._column(name)
        if not column.is_nested:
            raise ShapeError(f"column {name!r} is one value a row; only ragged columns have lengths")
        offsets: Tensor = column.offsets()  # type: ignore[attr-defined]  # every jagged tensor has them
        return offsets.diff().cpu()

    def put(self, name: str, values: Tensor, lengths: Sequence[int] | Tensor | None = None) -> None:
        """Write a column: [B], or the [N] values of a ragged one.

        lengths  tokens of each row; may be left out where the column is shaped like one already written.
        Raises ShapeError when the sizes disagree with the rows or with the response, or fractions would be cut off.
        """
        field = _field(name)
        if values.is_floating_point() and field.dtype == torch.int64:
            raise ShapeError(f"column {name!r} holds integers, got {values.dtype}")
        values = values.detach().to(field.dtype)
        if field.shape == "row":
            if values.shape != (len(self),):
                raise ShapeError(f"column {name!r} needs shape [{len(self)}], got {list(values.shape)}")
            self._columns.set(name, values)
            return
        alike = [other for other in _alike(field.shape) if other in self and other != name]
        if lengths is None:
            lengths = self.lengths(alike[0] if alike else f"{field.shape}_ids")
        lengths = torch.as_tensor(lengths, dtype=torch.int64).cpu()
        _check_lengths(name, values, lengths, len(self))
        if alike and not torch.equal(lengths, self.lengths(alike[0])):
            raise ShapeError(f"column {name!r} must have the lengths of {alike[0]!r}, which is in the batch already")
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(values.device)
        self._columns.set(name, torch.nested.nested_tensor_from_jagged(values, offsets))

    def padded(self, name: str, fill: float = 0) -> Tensor:
        """[B, R] view of a ragged column; ``fill`` stands right of each row's end."""
        return pad_rows(self[name], self.lengths(name), fill)

    def put_padded(self, name: str, padded: Tensor) -> None:
        """Write a response-shaped column from [B, R]; what stands right of a row's end is dropped."""
        if _field(name).shape == "row":
            raise ShapeError(f"column {name!r} is one value a row; write it with put")
        lengths = self.lengths(f"{_field(name).shape}_ids")
        self.put(name, unpad_rows(padded, lengths), lengths)

    def columns(self, names: Iterable[str] | None = None) -> Batch:
        """The same rows with these columns only (None: all) and without their mappings: what a worker needs of them."""
        part = Batch([{}] * len(self))
        for name in self.names if names is None else names:
            part._columns.set(name, self._column(name))
        return part

    def select(self, index: Sequence[int] | Tensor) -> Batch:
        """The rows at ``index``, in that order; a boolean mask [B] keeps the rows where it is True."""
        index = self._row_numbers(index)
        part = Batch([self.rows[i] for i in index.tolist()])
        for name in self.names:
            column = self._column(name)
            if column.is_nested:
                pieces = torch.split(_values(column), self.lengths(name).tolist())
                chosen = [pieces[i] for i in index.tolist()]
                values = torch.cat(chosen) if chosen else _values(column)[:0]
                part.put(name, values, self.lengths(name)[index])
            else:
                part.put(name, column[index.to(column.device)])
        return part

    @staticmethod
    def cat(batches: Sequence[Batch]) -> Batch:
        """The rows of all ``batches``, at least one, which must hold the same columns. Raises ShapeError if not."""
        if not batches:
            raise ShapeError("no batches to join: without one the columns aren't known")
        names = batches[0].names
        for other in batches[1:]:
            if other.names != names:
                raise ShapeError(f"batches hold different columns: {names} and {other.names}")
        whole = Batch([row for batch in batches for row in batch.rows])
        for name in names:
            values = torch.cat([batch[name] for batch in batches])
            ragged = FIELDS[name].shape != "row"
            whole.put(name, values, torch.cat([b.lengths(name) for b in batches]) if ragged else None)
        return whole

    def _row_numbers(self, index: Sequence[int] | Tensor) -> Tensor:
        index = torch.as_tensor(index).cpu()
        if index.dtype == torch.bool:
            if index.shape != (len(self),):
                raise ShapeError(f"a mask over {len(self)} rows has shape {list(index.shape)}")
            return index.nonzero().reshape(-1)
        return index.to(torch.int64).reshape(-1)

    def _column(self, name: str) -> Tensor:
        field = _field(name)
        if name not in self:
            raise MissingField(f"column {name!r} isn't in the batch yet: {field.written_by} writes it")
        column: Tensor = self._columns.get(name)
        return column


def pad_rows(values: Tensor, lengths: Tensor, fill: float = 0) -> Tensor:
    """[N] packed values to [B, R], ``fill`` right of each row's end. Raises ShapeError when N isn't their sum."""
    _check_lengths("values", values, lengths, len(lengths))
    width = int(lengths.max()) if len(lengths) else 0
    places = to_device(row_mask(lengths, width).flatten().nonzero()[:, 0], values.device)
    return values.new_full((len(lengths) * width,), fill).index_copy(0, places, values).view(len(lengths), width)


def unpad_rows(padded: Tensor, lengths: Tensor) -> Tensor:
    """[B, R] to the [N] values within ``lengths``. Raises ShapeError when a row is longer than R."""
    if padded.dim() != 2 or padded.shape[0] != len(lengths) or (len(lengths) and int(lengths.max()) > padded.shape[1]):
        raise ShapeError(f"{list(padded.shape)} padded values don't hold rows of lengths {lengths.tolist()}")
    return padded[row_mask(lengths, padded.shape[1]).to(padded.device)]


def row_mask(lengths: Tensor, width: int) -> Tensor:
    """[B, width] bool: True within each row's length."""
    return torch.arange(width)[None, :] < lengths.cpu()[:, None]


def _values(column: Tensor) -> Tensor:
    values: Tensor = column.values()
    return values


def _alike(shape: str) -> list[str]:
    return [name for name, field in FIELDS.items() if field.shape == shape]


def _check_lengths(name: str, values: Tensor, lengths: Tensor, rows: int) -> None:
    fits = lengths.shape == (rows,) and values.dim() == 1 and int(lengths.sum()) == len(values)
    if not fits or (rows and int(lengths.min()) < 0):
        raise ShapeError(
            f"column {name!r}: {list(values.shape)} values for {lengths.numel()} lengths summing to "
            f"{int(lengths.sum())}, none negative, in a batch of {rows} rows"
        )


def _field(name: str) -> Field:
    if name not in FIELDS:
        raise MissingField(f"{name!r} is no column of the field table{did_you_mean(name, FIELDS)}")
    return FIELDS[name]
