from __future__ import annotations

import pytest
import torch

from tests.batches import sampled_batch
from tests.tiny import tiny_model
from verl.observe.flops import ModelShape, training_flops
from verl.trainer.measures import Compute, describe_responses, throughput

CPU = Compute("cpu", 1)
TIMINGS = {"timing/step_s": 4.0, "timing/generate_s": 2.0, "timing/update_actor_s": 0.5}


def test_lengths_and_ends() -> None:
    batch = sampled_batch([2, 4], [3, 5])
    batch.put("finish_reason", torch.tensor([0, 1]))
    described = describe_responses(batch)
    assert described["rollout/response_len/mean"] == 4 and described["rollout/response_len/max"] == 5
    assert described["rollout/response_len/min"] == 3 and described["rollout/prompt_len/mean"] == 3
    assert described["rollout/truncated_frac"] == 0.5 and described["rollout/aborted_frac"] == 0


def test_throughput_by_hand() -> None:
    """14 tokens, 8 of them new, in 4 s; trained on twice in half a second."""
    shape = ModelShape.of(tiny_model("llama"))
    found = throughput(sampled_batch([2, 4], [3, 5]), TIMINGS, shape, 2, CPU)
    assert found["perf/tokens"] == 14 and found["perf/tokens_per_s"] == 3.5
    assert found["perf/rollout_tokens_per_s"] == 4.0 and found["perf/train_tokens_per_s"] == 56.0
    assert "perf/actor_mfu" not in found  # a CPU's peak isn't known


def test_speed_of_training_is_that_of_the_rows_trained_on() -> None:
    """Of rows of 5 and 9 tokens the first alone is trained on, twice in half a second; or none."""
    shape, batch = ModelShape.of(tiny_model("llama")), sampled_batch([2, 4], [3, 5])
    found = throughput(batch, TIMINGS, shape, 2, CPU, trained=batch.select([0]))
    assert found["perf/tokens"] == 14 and found["perf/rollout_tokens_per_s"] == 4.0
    assert found["perf/train_tokens_per_s"] == 20.0
    nothing = throughput(batch, TIMINGS, shape, 2, CPU, trained=batch.select([]))
    assert nothing["perf/tokens"] == 14 and nothing["perf/train_tokens_per_s"] == 0


def test_utilisation_where_the_peak_is_known() -> None:
    """Of the peak of all devices together: 989 TFLOP/s of each."""
    shape = ModelShape.of(tiny_model("llama"))
    found = throughput(sampled_batch([2, 4], [3, 5]), TIMINGS, shape, 2, Compute("NVIDIA H200", 4))
    assert found["perf/actor_mfu"] == pytest.approx(2 * training_flops(shape, [5, 9]) / (0.5 * 4 * 989e12))
