"""What becomes of the rows of a source: each is kept, cut, left out for a reason, or a fault that is named.

In: what a loader makes of its rows, or raises at them. Out: a ``LoadReport``, or one error that names every row at
fault. Knows nothing of columns, tokenizers or what a row is made into.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from verl.common.errors import DataError
from verl.data.sources import SourceRow, raise_problems
from verl.data.vocabulary import UnknownText, advice_on

MadeT = TypeVar("MadeT")

OVERLONG = "overlong"
"""The reason that rows beyond a length limit are left out for."""


@dataclass(frozen=True)
class Incident:
    """A row that was left out or cut: its ``row_id``, where it stands ("a.jsonl:17") and why."""

    row_id: int
    where: str
    detail: str


@dataclass(frozen=True)
class LoadReport:
    """What became of the rows: ``rows_read`` = ``rows_kept`` + those in ``dropped``, which is by reason.

    truncated  rows that were kept, but cut to a limit
    Where a row makes several examples, ``rows_kept`` and ``dropped`` count these.
    """

    rows_read: int
    rows_kept: int
    dropped: dict[str, tuple[Incident, ...]]
    truncated: tuple[Incident, ...]

    def summary(self) -> str:
        """One line: the counts, and the first three rows of each kind by name."""
        parts = [f"read {self.rows_read} rows, kept {self.rows_kept}"]
        for reason, incidents in self.dropped.items():
            parts.append(f"{len(incidents)} dropped ({reason}): {name_some(incidents)}")
        if self.truncated:
            parts.append(f"{len(self.truncated)} cut: {name_some(self.truncated)}")
        return "; ".join(parts)


class LeftOut(DataError):
    """A row that the ``data`` section says to leave out, counted under ``reason``."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Refused(DataError):
    """A row beyond a limit, where the ``data`` section says that there may be none."""


def overlong(rule: str, detail: str) -> DataError:
    """What to raise at a row beyond a length limit that isn't to be cut: ``rule`` is "error", or it is left out."""
    return Refused(detail) if rule == "error" else LeftOut(OVERLONG, detail)


class Gathering(Generic[MadeT]):
    """Rows on their way into a data set: ``kept`` is what has been made of them, in order.

    key       the configuration key that the rows came from, for messages
    num_rows  rows that the source has
    """

    def __init__(self, key: str, num_rows: int) -> None:
        self.kept: list[MadeT] = []
        self._key, self._num_rows = key, num_rows
        self._cut: list[Incident] = []
        self._dropped: dict[str, list[Incident]] = {OVERLONG: []}  # named before other reasons
        self._refused: list[str] = []
        self._problems: list[str] = []
        self._unknown: list[UnknownText] = []

    @contextmanager
    def judging(self, row_id: int, row: SourceRow) -> Iterator[None]:
        """Of ``row`` is kept what the block gets to; what it raises is counted: LeftOut, Refused, any DataError.

        Blocks may stand inside one another: then a row's examples are judged one by one.
        """
        named = f"{row.where} (row {row_id})"
        try:
            yield
        except LeftOut as error:
            self._dropped.setdefault(error.reason, []).append(Incident(row_id, row.where, str(error)))
        except Refused as error:
            self._refused.append(f"{named}: {error}")
        except DataError as error:
            if isinstance(error, UnknownText):
                self._unknown.append(error)
            self._problems.append(f"{named}: {error}")

    def must_cut(self, row_id: int, row: SourceRow, num_tokens: int, limit: int, rule: str) -> bool:
        """Whether ``row`` is to be cut to ``limit`` tokens, and counts it then. Raises as ``overlong`` does."""
        if num_tokens <= limit:
            return False
        detail = f"{num_tokens} tokens, limit {limit}"
        if rule in ("drop", "error"):
            raise overlong(rule, detail)
        self.note_cut(row_id, row, detail)
        return True

    def note_cut(self, row_id: int, row: SourceRow, detail: str) -> None:
        """Count a row that is kept, but not whole."""
        self._cut.append(Incident(row_id, row.where, detail))

    def report(self, advice: str) -> LoadReport:
        """The counts. Raises DataError naming the rows at fault, or else those refused, with the ``advice`` on them."""
        if self._problems:
            other = f", or {advice_on(self._unknown)}" if self._unknown else ""
            raise_problems(self._key, self._problems, self._num_rows, f"Mend or remove these rows{other}:")
        if self._refused:
            raise_problems(self._key, self._refused, self._num_rows, advice)
        dropped = {reason: tuple(found) for reason, found in self._dropped.items() if found}
        return LoadReport(self._num_rows, len(self.kept), dropped, tuple(self._cut))


def name_some(incidents: Sequence[Incident]) -> str:
    """The first three by name, and how many more."""
    named = ", ".join(f"{incident.where} ({incident.detail})" for incident in incidents[:3])
    return named + (f" and {len(incidents) - 3} more" if len(incidents) > 3 else "")
