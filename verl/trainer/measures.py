"""Numbers that every step reports about itself: lengths, truncation, throughput."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl.batch import Batch, FinishReason
from verl.engines.packing import row_lengths
from verl.observe.flops import ModelShape, mfu, training_flops


@dataclass(frozen=True)
class Compute:
    """What a role computes on: ``num_devices`` like ``device``, which is one of this process, or the name of one."""

    device: torch.device | str
    num_devices: int


def describe_responses(batch: Batch) -> dict[str, float]:
    """Lengths of prompts and responses in tokens and how responses ended."""
    response, prompt = batch.lengths("response_ids").float(), batch.lengths("prompt_ids").float()
    finish = batch["finish_reason"]
    return {
        "rollout/response_len/mean": float(response.mean()),
        "rollout/response_len/max": float(response.max()),
        "rollout/response_len/min": float(response.min()),
        "rollout/prompt_len/mean": float(prompt.mean()),
        "rollout/prompt_len/max": float(prompt.max()),
        "rollout/truncated_frac": float((finish == FinishReason.LENGTH).float().mean()),
        "rollout/aborted_frac": float((finish == FinishReason.ABORT).float().mean()),
    }


def throughput(
    batch: Batch,
    timings: dict[str, float],
    shape: ModelShape,
    passes: int,
    compute: Compute,
    trained: Batch | None = None,
) -> dict[str, float]:
    """Tokens a second of the step and of its phases, model FLOP utilisation where the device's peak is known.

    batch    all that was sampled
    timings  `timing/<phase>_s`, with generate and step among them, and update_actor where it learned
    passes   times the actor trained on each token
    compute  what it trained on
    trained  the rows that it trained on; None: all
    """
    new = int(batch.lengths("response_ids").sum())
    tokens = int(row_lengths(batch).sum())
    measured = {
        "perf/tokens": float(tokens),
        "perf/tokens_per_s": tokens / timings["timing/step_s"],
        "perf/rollout_tokens_per_s": new / timings["timing/generate_s"],
    }
    seconds = timings.get("timing/update_actor_s")
    if seconds is None:
        return measured
    return measured | training_speed(batch if trained is None else trained, seconds, shape, passes, compute)


def training_speed(batch: Batch, seconds: float, shape: ModelShape, passes: int, compute: Compute) -> dict[str, float]:
    """Tokens a second of an update on ``batch``, model FLOP utilisation where the device's peak is known.

    seconds  that the update took
    passes   times it trained on each token
    compute  what it trained on
    """
    rows = row_lengths(batch).tolist()
    measured = {"perf/train_tokens_per_s": passes * sum(rows) / seconds}
    utilisation = mfu(passes * training_flops(shape, rows), seconds, compute.device, compute.num_devices)
    return measured if utilisation is None else measured | {"perf/actor_mfu": utilisation}


def describe_answers(batch: Batch) -> dict[str, float]:
    """Lengths of the prompts and answers that a step learned from, in tokens."""
    response, prompt = batch.lengths("response_ids").float(), batch.lengths("prompt_ids").float()
    return {
        "data/response_len/mean": float(response.mean()),
        "data/response_len/max": float(response.max()),
        "data/prompt_len/mean": float(prompt.mean()),
        "data/prompt_len/max": float(prompt.max()),
    }
