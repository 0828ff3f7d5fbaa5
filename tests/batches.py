"""Small batches of given lengths, as a rollout would have made them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.tiny import VOCAB
from verl.batch import Batch


def sampled_batch(prompts: Sequence[int], responses: Sequence[int], seed: int = 0) -> Batch:
    """Rows with random ids of the given lengths, random advantages, returns and rollout log-probs."""
    generator = torch.Generator().manual_seed(seed)
    batch = Batch([{"prompt": "", "response": "", "ground_truth": None, "source": ""} for _ in prompts])

    def ids(n: int) -> Tensor:
        return torch.randint(3, VOCAB, (n,), generator=generator)

    def numbers(n: int) -> Tensor:
        return torch.randn(n, generator=generator)

    batch.put("prompt_ids", ids(sum(prompts)), list(prompts))
    batch.put("response_ids", ids(sum(responses)), list(responses))
    batch.put("response_mask", torch.ones(sum(responses), dtype=torch.bool))
    for name in ("advantages", "returns", "values"):
        batch.put(name, numbers(sum(responses)))
    batch.put("rollout_log_probs", -numbers(sum(responses)).abs())
    batch.put("finish_reason", torch.zeros(len(prompts), dtype=torch.int64))
    batch.put("policy_version", torch.zeros(len(prompts), dtype=torch.int64))
    batch.put("row_id", torch.arange(len(prompts)))
    batch.put("group_id", torch.arange(len(prompts)) // 2)
    return batch
