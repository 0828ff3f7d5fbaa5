"""The measure has a row a cell, and the program's cost doesn't follow the payload."""

from __future__ import annotations

from verl.controller.measure import measure_calls


def test_cost_does_not_follow_the_payload() -> None:
    rows = measure_calls(sizes=[1024, 16 * 1024 * 1024], ranks=[1, 2], num_calls=9)
    assert [(row["num_ranks"], row["payload_bytes"]) for row in rows] == [(2, 1024), (2, 2**24), (1, 1024)]
    assert all(0 < row["submit_s"] < row["total_s"] for row in rows)
    assert rows[1]["busy_s"] < 0.004  # to read 16 MB once takes this long; the program doesn't
