"""Figures print one a line, and every benchmark says what it ran on."""

from __future__ import annotations

import torch
import transformers

import verl
from verl.bench.setting import figure_lines, machine_setting


def test_a_mapping_within_gives_its_name_to_its_figures() -> None:
    lines = figure_lines({"device": "cpu", "fixed": {"rows": 12345, "generate": {"ratio": 2.34567}}, "s": -1234.5})
    assert [line.split() for line in lines] == [
        ["device", "cpu"],
        ["fixed/rows", "12345"],
        ["fixed/generate/ratio", "2.346"],
        ["s", "-1,234"],
    ]
    assert len({line.rindex(" ") for line in lines}) == 1, "values begin in one column"


def test_nothing_prints_nothing() -> None:
    assert figure_lines({}) == []


def test_setting_has_versions_and_size() -> None:
    setting = machine_setting(torch.device("cpu"), torch.nn.Linear(3, 5))
    assert setting.pop("device").startswith("cpu, ")
    assert setting == {
        "verl": verl.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "parameters": 20,
    }
