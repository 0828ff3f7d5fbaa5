"""Names to implementations, as explicit tables: greppable, lazy, without import side effects."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from verl.common.errors import UnknownName


class Registry(Mapping[str, str]):
    """A table ``name -> "module:attribute"`` whose entries are imported when asked for.

    kind     what an entry is, for error messages ("algorithm", "reward")
    entries  name -> "package.module:attribute"
    """

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def load(self, name: str) -> Any:
        """The object that ``name`` stands for. Raises UnknownName with the nearest known name."""
        if name not in self._entries:
            raise UnknownName(self.kind, name, self._entries)
        module, _, attribute = self._entries[name].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def __getitem__(self, name: str) -> str:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
