"""How far the log-probs that a rollout engine returns are from those that training computes for the same tokens."""

from __future__ import annotations

import math
from typing import Any

import torch

from verl.batch import Batch
from verl.bench.subject import Call, Subject
from verl.engines.base import Engine
from verl.engines.config import EngineConfig
from verl.models.networks import PolicyNetwork


def log_prob_difference(subject: Subject, call: Call) -> dict[str, Any]:
    """Mean, largest and 99.9th percentile of \\|difference\\| in nats, over every token that ``call`` sampled.

    The other side is the trainer's own forward pass: packed rows, the module's compute type, log-softmax in float32.
    """
    batch = _batch(call)
    trained = Engine(PolicyNetwork(subject.lm, subject.rollout.temperature), EngineConfig(), subject.device)
    gaps = (batch["rollout_log_probs"] - trained.infer(batch, "log_probs")).abs().double()
    rank = math.ceil(0.999 * len(gaps))
    return {
        "tokens": len(gaps),
        "mean": float(gaps.mean()),
        "p99.9": float(gaps.kthvalue(rank).values),
        "max": float(gaps.max()),
    }


def _batch(call: Call) -> Batch:
    prompts = [request.prompt_ids for request in call.requests]
    lengths = [len(response.response_ids) for response in call.responses]
    batch = Batch([{}] * len(prompts))
    batch.put("prompt_ids", torch.tensor([i for ids in prompts for i in ids]), [len(ids) for ids in prompts])
    batch.put("response_ids", torch.tensor([i for r in call.responses for i in r.response_ids]), lengths)
    batch.put("rollout_log_probs", torch.tensor([x for r in call.responses for x in r.log_probs]), lengths)
    return batch
