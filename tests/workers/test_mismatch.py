from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.algorithms.rows import near
from tests.tiny import tiny_model
from verl.batch import Batch
from verl.data.examples import Answer, Example, ExampleDataset, answers_batch, collate
from verl.data.gathering import LoadReport
from verl.data.mismatch import with_mismatches
from verl.engines.base import TrainingEngine
from verl.engines.config import OptimConfig, TrainedConfig
from verl.models.causal_lm import CausalLM
from verl.models.networks import PolicyNetwork
from verl.workers.mismatch import MismatchedKL, kl_estimate
from verl.workers.starting_policy import StartingPolicy


def measured(now: list[list[float]], ref: list[list[float]], mask: list[list[bool]] | None = None) -> Batch:
    batch = answers_batch([Answer((5,), (7,) * len(row), (True,) * len(row)) for row in now])
    if mask is not None:
        batch.put("response_mask", torch.tensor([x for row in mask for x in row]))
    batch.put("old_log_probs", torch.tensor([x for row in now for x in row]))
    batch.put("ref_log_probs", torch.tensor([x for row in ref for x in row]))
    return batch


def test_a_mean_over_rows_of_sums_over_tokens() -> None:
    near(kl_estimate(measured([[-1.0, -1.0], [-0.5]], [[-1.5, -2.0], [-1.0]])), (1.5 + 0.5) / 2)


def test_never_below_0() -> None:
    assert float(kl_estimate(measured([[-3.0], [-1.0]], [[-1.0], [-1.5]]))) == 0


def test_rows_and_tokens_that_do_not_count_are_left_out() -> None:
    batch = measured([[-1.0, float("nan")], [-9.0]], [[-2.0, 0.0], [-1.0]], [[True, False], [False]])
    near(kl_estimate(batch), 1.0)
    assert float(kl_estimate(measured([[-9.0]], [[-1.0]], [[False]]))) == 0
    assert float(kl_estimate(measured([[]], [[]]))) == 0


@pytest.mark.parametrize("size", [1, 3])
def test_the_policy_is_measured_on_answers_to_other_prompts(size: int, tmp_path: Path) -> None:
    rows = [Example(i, (Answer((10 + i,), (20 + i, 2), (True, True)),), (True,), "rows") for i in range(5)]
    examples = with_mismatches(ExampleDataset(rows, LoadReport(5, 5, {}, ())), seed=0, max_tokens=3)
    network = PolicyNetwork(CausalLM(tiny_model("llama")))
    config = TrainedConfig(optim=OptimConfig(lr=0.05, max_grad_norm=None))
    engine = TrainingEngine(network, config, torch.device("cpu"), "actor")
    policy = StartingPolicy(engine, tmp_path / "reference")
    mismatched = [example.mismatched for example in examples if example.mismatched is not None]
    policy.prepare(mismatched)
    batch = collate(examples[:size])
    MismatchedKL(engine, policy).infer(batch)
    assert batch["kl_estimate"].tolist() == pytest.approx([0.0] * size, abs=1e-5)

    from verl.algorithms.sft import SFT, SFTConfig

    sft = SFT(SFTConfig())
    learned = answers_batch(mismatched)
    engine.update(learned, lambda out, columns: sft.actor_loss(out["log_probs"], None, columns), lr=0.05)
    MismatchedKL(engine, policy).infer(batch)
    probe = answers_batch(mismatched[:size])
    policy.infer(probe)
    ratio = engine.infer(probe, "log_probs") - probe["ref_log_probs"]
    assert float(ratio.sum()) > 0.1 * size
    assert batch["kl_estimate"].tolist() == pytest.approx([float(ratio.sum()) / size] * size, rel=1e-4)
