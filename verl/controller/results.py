"""Results as the controller holds them: where the bytes are and which rows count, never the bytes themselves.

A ``Result`` is a small description that travels in a command; whoever needs the value loads it, straight from where
the producer put it. Cutting and joining results makes new descriptions and moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl.controller.payload import Index, Reader, check_columns, unpack
from verl.controller.rows import is_batch, join_rows, num_rows, shard_bounds, take_rows


class Result(Protocol):
    """A value that lies somewhere."""

    @property
    def num_rows(self) -> int | None:
        """Its rows; None where it has none."""
        ...

    def load(self, columns: Sequence[str] | None = None) -> Any:
        """The value, here; with ``columns`` only these of a batch or a mapping."""
        ...

    def take(self, start: int, stop: int) -> Result:
        """Rows ``start`` to ``stop`` as a result."""
        ...


Store = Callable[[Any], Result]
"""Puts a value where the workers of an executor can load it from."""


class Block(Protocol):
    """Bytes that lie somewhere."""

    def open(self) -> Reader:
        """What reads sections of them here."""
        ...


class Sliceable:
    """``take`` for results that hold their rows whole."""

    def take(self: Result, start: int, stop: int) -> Result:
        """Rows ``start`` to ``stop`` as a result."""
        return Part(self, start, stop)


@dataclass(frozen=True)
class Kept(Sliceable):
    """A value of this process, handed over as it is. Containers are copied, what they hold isn't."""

    value: Any

    @property
    def num_rows(self) -> int | None:
        return num_rows(self.value)

    def load(self, columns: Sequence[str] | None = None) -> Any:
        if columns is not None:
            is_mapping = isinstance(self.value, dict)
            check_columns(columns, self.value.names if is_batch(self.value) else [*self.value] if is_mapping else None)
            return _columns(self.value, columns)
        if is_batch(self.value):
            return _columns(self.value, self.value.names, self.value.rows)
        return self.value.copy() if type(self.value) in (list, dict) else self.value


@dataclass(frozen=True)
class Stored(Sliceable):
    """A value packed into a block."""

    index: Index
    block: Block

    @property
    def num_rows(self) -> int | None:
        return self.index.num_rows

    def load(self, columns: Sequence[str] | None = None) -> Any:
        return unpack(self.index, self.block.open(), columns)


@dataclass(frozen=True)
class Part:
    """Some neighbouring rows of a result."""

    source: Result
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    def load(self, columns: Sequence[str] | None = None) -> Any:
        return take_rows(self.source.load(columns), self.start, self.stop)

    def take(self, start: int, stop: int) -> Part:
        return Part(self.source, self.start + start, self.start + stop)


@dataclass(frozen=True)
class Joined:
    """The rows of several results, one after the other."""

    parts: tuple[Result, ...]

    @property
    def num_rows(self) -> int | None:
        counts = [part.num_rows for part in self.parts]
        return None if None in counts else sum(count or 0 for count in counts)

    def load(self, columns: Sequence[str] | None = None) -> Any:
        if columns is not None and self.num_rows:  # a rank without rows may not have written the column
            return join_rows([part.load(columns) for part in self.parts if part.num_rows])
        return join_rows([part.load(columns) for part in self.parts])

    def take(self, start: int, stop: int) -> Joined:
        first, found = 0, []
        for part in self.parts:
            rows = part.num_rows or 0
            low, high = max(start - first, 0), min(stop - first, rows)
            if low < high:
                found.append(part.take(low, high))
            first += rows
        return Joined(tuple(found) or (self.parts[0].take(0, 0),))


@dataclass(frozen=True)
class Listed(Sliceable):
    """Several results as the items of a list."""

    parts: tuple[Result, ...]

    @property
    def num_rows(self) -> int:
        return len(self.parts)

    def load(self, columns: Sequence[str] | None = None) -> list[Any]:
        return [part.load(columns) for part in self.parts]


def shards(result: Result, count: int) -> list[Result]:
    """``count`` runs of neighbouring rows of a result that has rows."""
    return [result.take(start, stop) for start, stop in shard_bounds(result.num_rows or 0, count)]


def _columns(value: Any, names: Sequence[str], rows: Sequence[Any] | None = None) -> Any:
    if not is_batch(value):
        return {name: value[name] for name in names}
    from verl.batch import FIELDS, Batch

    part = Batch([{}] * len(value) if rows is None else rows)
    for name in names:
        part.put(name, value[name], None if FIELDS[name].shape == "row" else value.lengths(name))
    return part
