"""What a call costs the program, against payload and number of workers: ``verl bench controller``.

The measure is the controller's own; here it gets its setting and is put into lines.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any

import torch

import verl
from verl.bench.setting import figure_lines
from verl.common.errors import ConfigError, UnknownName
from verl.controller.measure import RANKS, SIZES, measure_calls

STARTING = ("processes", "ray")
"""Executors that start their workers: the others have those that are there."""
_COLUMNS = ("num_ranks", "payload_bytes", "submit_s", "busy_s", "total_s")


def measure_controller(
    executor: str = "processes", *, num_calls: int = 20, max_ranks: int = RANKS[-1]
) -> dict[str, Any]:
    """Under ``calls`` a row a cell, as ``verl.controller.measure.CallCost`` names them; ``setting`` says on what.

    executor   one of ``STARTING``
    num_calls  calls that medians are of, after a first one
    max_ranks  workers of the widest call
    Raises ConfigError, UnknownName.
    """
    if executor not in STARTING:
        raise UnknownName("executor for the measure, which starts its workers,", executor, STARTING)
    for option, value, least in (("--calls", num_calls, 1), ("--max-ranks", max_ranks, 2)):
        if value < least:
            raise ConfigError(f"{option} must be at least {least}, got {value}")
    ranks = [count for count in RANKS if count <= max_ranks]
    rows = measure_calls(SIZES, ranks, num_calls=num_calls, executor=executor)
    return {"setting": _setting(executor, num_calls), "calls": rows}


def controller_lines(found: dict[str, Any]) -> list[str]:
    """The setting, then a table of one line a cell, times in milliseconds."""
    head = ["ranks", "payload bytes", "submit ms", "busy ms", "total ms"]
    return [*figure_lines(found["setting"]), _row(head), *(_row(_cells(row)) for row in found["calls"])]


def _cells(row: dict[str, Any]) -> list[str]:
    ranks, payload, *seconds = (row[name] for name in _COLUMNS)
    return [f"{ranks}", f"{payload:,}", *(f"{1000 * value:.3f}" for value in seconds)]


def _row(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>15}" for cell in cells)


def _setting(executor: str, num_calls: int) -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "verl": verl.__version__,
        "torch": torch.__version__,
        "executor": executor,
        "calls": num_calls,
    }
