from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_model
from verl.common.errors import StaleWeights
from verl.data.examples import Answer, answers_batch
from verl.engines.base import Engine
from verl.engines.config import EngineConfig
from verl.models.causal_lm import CausalLM
from verl.models.networks import PolicyNetwork
from verl.workers.starting_policy import FILE, StartingPolicy

ANSWERS = [Answer((5, 6), (7, 8, 2), (True,) * 3), Answer((5,), (9,), (True,)), Answer((6, 5, 7), (), ())]


class CountedEngine(Engine):
    """Knows how many rows it has run."""

    rows = 0

    def infer(self, batch, output):  # type: ignore[no-untyped-def]
        self.rows += len(batch)
        return super().infer(batch, output)


def engine(seed: int = 0) -> CountedEngine:
    return CountedEngine(PolicyNetwork(CausalLM(tiny_model("llama", seed))), EngineConfig(), torch.device("cpu"))


def test_log_probs_are_the_engines_and_are_computed_once(tmp_path: Path) -> None:
    own = engine()
    policy = StartingPolicy(own, tmp_path / "reference")
    policy.prepare([*ANSWERS, *ANSWERS])
    assert own.rows == 3
    policy.prepare(ANSWERS)
    assert own.rows == 3
    batch = answers_batch([ANSWERS[i] for i in (1, 0, 2, 1)])
    policy.infer(batch)
    expected = engine().infer(batch, "log_probs")
    assert bool((expected < 0).all()) and len(expected) == 5
    torch.testing.assert_close(batch["ref_log_probs"], expected)


def test_what_was_kept_is_taken_up_again(tmp_path: Path) -> None:
    StartingPolicy(engine(), tmp_path / "reference").prepare(ANSWERS[:2])
    assert (tmp_path / "reference" / FILE).is_file()
    again = engine()
    policy = StartingPolicy(again, tmp_path / "reference")
    policy.prepare(ANSWERS)
    assert again.rows == 1 + 1, "one to see that it is the same policy, one that was new"
    batch = answers_batch(ANSWERS)
    policy.infer(batch)
    torch.testing.assert_close(batch["ref_log_probs"], engine().infer(batch, "log_probs"))


def test_what_another_policy_gave_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    StartingPolicy(engine(seed=1), tmp_path / "reference").prepare(ANSWERS)
    policy = StartingPolicy(engine(), tmp_path / "reference")
    with caplog.at_level(logging.WARNING):
        policy.prepare(ANSWERS)
    assert "another starting policy" in caplog.text
    batch = answers_batch(ANSWERS)
    policy.infer(batch)
    torch.testing.assert_close(batch["ref_log_probs"], engine().infer(batch, "log_probs"))


def test_an_answer_that_comes_too_late_is_refused(tmp_path: Path) -> None:
    policy = StartingPolicy(engine(), tmp_path / "reference")
    policy.prepare(ANSWERS[:1])
    with pytest.raises(StaleWeights, match=r"log-probs of 1 answers .* trainer\.total_steps"):
        policy.infer(answers_batch(ANSWERS[:2]))
