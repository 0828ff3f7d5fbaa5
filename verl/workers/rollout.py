"""The rollout role: prompts to a batch of sampled responses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from verl.batch import Batch
from verl.common.seeding import derive_seed
from verl.data.prompts import PromptRow
from verl.rollout.base import Request, Response, RolloutEngine, SamplingParams


class Rollout:
    """Samples ``group_size`` responses to each prompt; every draw's seed is a function of what it is for."""

    name = "rollout"

    def __init__(
        self, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, sampling: SamplingParams, group_size: int
    ) -> None:
        self.engine, self.tokenizer, self.sampling, self.group_size = engine, tokenizer, sampling, group_size

    def generate(
        self, prompts: Sequence[PromptRow], *seed_parts: int | str, places: Sequence[int] | None = None
    ) -> Batch:
        """A batch with ids, mask, log-probs, versions and finish reasons; the responses of a prompt are a group.

        seed_parts  with the prompt's place and the sample's number, the seed of each response
        places      one a prompt; left out, its place among ``prompts``
        Each row's mapping holds prompt, response (text without special tokens), ground_truth and the data's columns.
        """
        requests = [
            Request(prompt_ids=prompt.prompt_ids, seed=derive_seed(*seed_parts, place, k), sampling=self.sampling)
            for place, prompt in zip(places or range(len(prompts)), prompts, strict=True)
            for k in range(self.group_size)
        ]
        responses = self.engine.generate(requests)
        return self._batch([p for p in prompts for _ in range(self.group_size)], responses)

    def _batch(self, prompts: Sequence[PromptRow], responses: Sequence[Response]) -> Batch:
        texts = self.tokenizer.batch_decode([r.response_ids for r in responses], skip_special_tokens=True)
        batch = Batch([{**p.as_mapping(), "response": text} for p, text in zip(prompts, texts, strict=True)])
        lengths = [len(r.response_ids) for r in responses]
        ids = torch.tensor([i for p in prompts for i in p.prompt_ids], dtype=torch.int64)
        batch.put("prompt_ids", ids, [len(p.prompt_ids) for p in prompts])
        batch.put("response_ids", torch.tensor([i for r in responses for i in r.response_ids]), lengths)
        batch.put("response_mask", torch.ones(sum(lengths), dtype=torch.bool), lengths)
        batch.put("rollout_log_probs", torch.tensor([x for r in responses for x in r.log_probs]), lengths)
        batch.put("row_id", torch.tensor([p.row_id for p in prompts]))
        batch.put("group_id", torch.arange(len(prompts)) // self.group_size)
        batch.put("policy_version", torch.tensor([r.policy_version for r in responses]))
        batch.put("finish_reason", torch.tensor([int(r.finish_reason) for r in responses]))
        return batch
