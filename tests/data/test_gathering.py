from __future__ import annotations

import pytest

from verl.common.errors import ConfigError, DataError
from verl.data.gathering import OVERLONG, Gathering, Incident, LeftOut, LoadReport, name_some, overlong
from verl.data.sources import SourceRow

ROWS = [SourceRow("a.jsonl", f"a.jsonl:{i + 1}", {}) for i in range(4)]


def gathered(*outcomes: DataError | int, rule: str = "drop", limit: int = 3) -> Gathering[int]:
    """Rows that raise or have so many tokens; what is kept of a row is its length."""
    gathering = Gathering[int]("data.train", len(outcomes))
    for row_id, outcome in enumerate(outcomes):
        with gathering.judging(row_id, ROWS[row_id]):
            if isinstance(outcome, DataError):
                raise outcome
            is_cut = gathering.must_cut(row_id, ROWS[row_id], outcome, limit, rule)
            gathering.kept.append(limit if is_cut else outcome)
    return gathering


def test_rows_are_left_out_by_reason_those_beyond_a_limit_first() -> None:
    found = gathered(LeftOut("no pair", "all of one label"), 2, 4, 3)
    assert found.kept == [2, 3]
    assert found.report("") == LoadReport(
        rows_read=4,
        rows_kept=2,
        dropped={
            OVERLONG: (Incident(2, "a.jsonl:3", "4 tokens, limit 3"),),
            "no pair": (Incident(0, "a.jsonl:1", "all of one label"),),
        },
        truncated=(),
    )
    assert list(found.report("").dropped) == [OVERLONG, "no pair"]


@pytest.mark.parametrize("rule", ["left", "right"])
def test_rows_that_are_cut_are_kept(rule: str) -> None:
    found = gathered(2, 4, rule=rule)
    assert found.kept == [2, 3]
    assert found.report("") == LoadReport(2, 2, {}, (Incident(1, "a.jsonl:2", "4 tokens, limit 3"),))


def test_rows_beyond_a_limit_are_an_error_with_its_advice() -> None:
    with pytest.raises(DataError, match=r"^data\.train: 1 of 2 rows .* Raise it:\n  a\.jsonl:2 \(row 1\): 4 tokens"):
        gathered(2, 4, rule="error").report("Raise it:")


def test_rows_at_fault_come_before_rows_beyond_a_limit() -> None:
    found = gathered(DataError("bad"), 4, LeftOut("no pair", ""), DataError("worse"), rule="error")
    with pytest.raises(DataError) as error:
        found.report("Raise it:")
    assert str(error.value) == (
        "data.train: 2 of 4 rows can't be used. Mend or remove these rows:\n"
        "  a.jsonl:1 (row 0): bad\n  a.jsonl:4 (row 3): worse"
    )


def test_examples_of_a_row_are_judged_one_by_one() -> None:
    gathering = Gathering[int]("data.train", 1)
    with gathering.judging(0, ROWS[0]):
        for length in (2, 9, 3):
            with gathering.judging(0, ROWS[0]):
                if length == 9:
                    raise overlong("drop", "9 tokens")
                gathering.kept.append(length)
    assert gathering.kept == [2, 3]
    assert gathering.report("").summary() == "read 1 rows, kept 2; 1 dropped (overlong): a.jsonl:1 (9 tokens)"


def test_what_is_no_fault_of_a_row_ends_the_loading() -> None:
    gathering = Gathering[int]("data.train", 1)
    with pytest.raises(ConfigError, match="no template"), gathering.judging(0, ROWS[0]):
        raise ConfigError("no template")


def test_only_the_first_three_are_named() -> None:
    incidents = [Incident(i, f"a.jsonl:{i}", "long") for i in range(5)]
    assert name_some(incidents[:1]) == "a.jsonl:0 (long)"
    assert name_some(incidents) == "a.jsonl:0 (long), a.jsonl:1 (long), a.jsonl:2 (long) and 2 more"
