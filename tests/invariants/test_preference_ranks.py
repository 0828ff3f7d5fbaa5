"""A DPO or KTO run over two worker processes makes the numbers of one process; an odd number of pairs is cut whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import SCRATCH, metrics_of
from verl.trainer.preference_trainer import PreferenceTrainer

ROWS = [
    {"prompt": f"{i}=", "chosen": f"{i % 7}1", "rejected": str(i % 5)}
    | {"response": str(i % 4) * (1 + i % 3), "label": i % 2}
    for i in range(20)
]


def metrics(folder: Path, algorithm: str, **placement: Any) -> list[dict[str, float]]:
    trainer = PreferenceTrainer(
        {"scratch": dict(SCRATCH), "tokenizer": "chars:0123456789+="},
        {"train": ROWS, "max_example_tokens": 12},
        val=ROWS[:3],
        algorithm=algorithm,
        actor={"optim": {"lr": 0.01}, "max_tokens_per_micro_batch": 24},
        trainer={"output_dir": folder, "rows_per_step": 7, "total_steps": 3, "device": "cpu"},
        placement=placement,
        track={"trackers": []},
    )
    trainer.run()
    trainer.close()
    return metrics_of(folder)


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_two_processes_are_one(algorithm: str, tmp_path: Path) -> None:
    one = metrics(tmp_path / "one", algorithm)
    two = metrics(tmp_path / "two", algorithm, executor="processes", devices=2)
    assert len(one) == 4 and one[-1]["actor/margin"] != 0
    for got, wanted in zip(two, one, strict=True):
        assert got == pytest.approx(wanted, rel=1e-4, abs=1e-5)
