"""An object as one block of bytes from which a column can be read without the others.

A batch or a mapping becomes one section a column, anything else one section. In a section, tensors and arrays stand
raw and aligned beside the pickle, so that reading maps them instead of copying, and what nobody touches is never
paged in. Tensors arrive on the CPU, contiguous, without gradient.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from verl.common.errors import MissingField, did_you_mean
from verl.controller.rows import is_batch, is_tensor, num_rows

_ALIGNMENT = 64
_ROWS = ""  # the section of a batch's row mappings: no column has this name


@dataclass(frozen=True)
class Section:
    """Where one column stands in the block, and in it (offset, bytes) of its pickle, then of each raw buffer."""

    start: int
    stop: int
    spans: tuple[tuple[int, int], ...]


Reader = Callable[[Section], memoryview]
"""The bytes of a section. They are the reader's own: writing to them changes nobody else's."""


@dataclass(frozen=True)
class Index:
    """What a block holds. Its size depends on the number of tensors, not on theirs.

    kind  "batch", "mapping" or "whole"
    """

    kind: str
    num_rows: int | None
    sections: Mapping[str, Section]
    num_bytes: int


def pack(value: object) -> tuple[Index, list[bytes | memoryview]]:
    """The index of ``value`` and the pieces that, end to end, are its block. Nothing raw is copied."""
    writer = _Writer()
    kind = "whole"
    if is_batch(value):
        kind = "batch"
        writer.add(_ROWS, value.rows)
        for name in value.names:
            writer.add(name, _column(value, name))
    elif type(value) is dict and all(isinstance(key, str) for key in value):
        kind = "mapping"
        for name, column in value.items():
            writer.add(name, column)
    else:
        writer.add(_ROWS, value)
    return Index(kind, num_rows(value), writer.sections, writer.num_bytes), writer.pieces


def unpack(index: Index, read: Reader, columns: Sequence[str] | None = None) -> Any:
    """The object back; its tensors are the very bytes that were read. With ``columns`` only these are.

    The rows of a batch without them are empty mappings. Raises MissingField for a column that isn't there.
    """
    if columns is not None:
        check_columns(columns, None if index.kind == "whole" else _named(index))
    if index.kind == "whole":
        return _load(index.sections[_ROWS], read)
    names = _named(index) if columns is None else columns
    if index.kind == "mapping":
        return {name: _load(index.sections[name], read) for name in names}
    from verl.batch import Batch

    batch = Batch(_load(index.sections[_ROWS], read) if columns is None else [{}] * (index.num_rows or 0))
    for name in names:
        batch.put(name, *_load(index.sections[name], read))
    return batch


def check_columns(columns: Sequence[str], present: Sequence[str] | None) -> None:
    """Raises MissingField for one of ``columns`` that isn't ``present``; None: the value has no columns."""
    if present is None:
        raise MissingField(f"columns {list(columns)} of a result that has none: a batch or a mapping has columns")
    for name in columns:
        if name not in present:
            raise MissingField(
                f"column {name!r} isn't in the result{did_you_mean(name, present)}; it holds {list(present)}"
            )


def _named(index: Index) -> list[str]:
    return [name for name in index.sections if index.kind != "batch" or name != _ROWS]


def _column(batch: Any, name: str) -> tuple[Any, Any]:
    from verl.batch import FIELDS

    return batch[name], None if FIELDS[name].shape == "row" else batch.lengths(name)


class _Writer:
    """Lays sections end to end."""

    def __init__(self) -> None:
        self.sections: dict[str, Section] = {}
        self.pieces: list[bytes | memoryview] = []
        self.num_bytes = 0

    def add(self, name: str, value: object) -> None:
        """Append ``value`` as section ``name``."""
        buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
        pieces = [memoryview(stream.getvalue()), *(buffer.raw() for buffer in buffers)]
        start, spans = self.num_bytes, []
        for piece in pieces:
            spans.append((self.num_bytes - start, piece.nbytes))
            gap = -piece.nbytes % _ALIGNMENT
            self.pieces += [piece, bytes(gap)] if gap else [piece]
            self.num_bytes += piece.nbytes + gap
        self.sections[name] = Section(start, self.num_bytes, tuple(spans))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # has no types
    """Plain CPU copies of tensors go beside the pickle; nested and other kinds are taken apart by torch into these."""

    def reducer_override(self, obj: object) -> Any:
        if is_tensor(obj):
            import torch

            if type(obj) is torch.Tensor and obj.layout is torch.strided and not obj.is_quantized:
                flat = obj.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
                raw: Any = flat.view(torch.uint8).numpy()
                return _tensor, (pickle.PickleBuffer(raw), obj.dtype, tuple(obj.shape))
        return super().reducer_override(obj)


def _tensor(raw: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    if not memoryview(raw).nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).reshape(shape)


def _load(section: Section, read: Reader) -> Any:
    data = read(section)
    stream, *buffers = (data[start : start + size] for start, size in section.spans)
    return pickle.loads(stream, buffers=buffers)
