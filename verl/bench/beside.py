"""The same work by another sampler, on the same weights: transformers' own ``generate``.

A batch of its stands until the longest row ends, so with lengths that differ only the tokens that were asked for count.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from typing import Any

import psutil  # type: ignore[import-untyped,unused-ignore]
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from verl.bench.subject import Call, Subject
from verl.rollout.base import Request


class Generate:
    """``generate`` of an unmodified module with the subject's weights, which it holds a second time; SDPA attention."""

    def __init__(self, subject: Subject) -> None:
        self._device, self._vocab_size = subject.device, subject.lm.vocab_size
        self._temperature = subject.rollout.temperature
        source = subject.lm.module
        with subject.device:
            made: Any = AutoModelForCausalLM.from_config(
                copy.deepcopy(source.config), dtype=source.dtype, attn_implementation="sdpa"
            )
        made.load_state_dict(source.state_dict())
        self._module = made.eval()

    def figures(self, calls: Sequence[Call]) -> dict[str, Any]:
        """Speed on the requests of ``calls``, one after the other; the first apart. Ratios are ours to theirs."""
        has_log_probs = self.can_keep_scores(calls[0].requests)
        rates = []
        for call in calls:
            started = time.perf_counter()
            self.sample(call.requests, has_log_probs)
            rates.append(call.tokens / (time.perf_counter() - started))
        theirs = statistics.median(rates[1:])
        return {
            "has_log_probs": has_log_probs,
            "tokens_per_s": theirs,
            "tokens_per_s_min": min(rates[1:]),
            "tokens_per_s_max": max(rates[1:]),
            "first_tokens_per_s": rates[0],
            "ratio": statistics.median(call.tokens_per_s for call in calls[1:]) / theirs,
            "first_ratio": calls[0].tokens_per_s / rates[0],
        }

    def sample(self, requests: Sequence[Request], has_log_probs: bool) -> tuple[list[list[int]], list[list[float]]]:
        """Ids and log-probs of responses, all as long as the longest that is asked for; without log-probs if unwanted.

        The prompts must be of one length, so that nothing is padded.
        """
        prompts = torch.tensor([request.prompt_ids for request in requests], device=self._device)
        longest = _longest(requests)
        self._module.generation_config = GenerationConfig(
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=True,
            temperature=self._temperature,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
            output_scores=has_log_probs,
            return_dict_in_generate=True,
        )
        out = self._module.generate(prompts, attention_mask=torch.ones_like(prompts))
        sampled: Tensor = out.sequences[:, prompts.shape[1] :]
        assert sampled.shape == (len(requests), longest), "generate stopped before its length"
        steps = enumerate(out.scores or ())
        log_probs = [scores.log_softmax(-1).gather(-1, sampled[:, i, None])[:, 0] for i, scores in steps]
        return sampled.tolist(), torch.stack(log_probs, 1).tolist() if log_probs else []

    def can_keep_scores(self, requests: Sequence[Request]) -> bool:
        """Whether half of the free memory holds the output scores: [rows, vocab] float32 for each token."""
        needed = len(requests) * _longest(requests) * self._vocab_size * torch.float32.itemsize
        if self._device.type != "cuda":
            return bool(needed <= psutil.virtual_memory().available // 2)
        torch.cuda.empty_cache()
        return needed <= torch.cuda.mem_get_info(self._device)[0] // 2


PEERS = {"generate": Generate}
"""Samplers to run beside the rollout engine."""


def _longest(requests: Sequence[Request]) -> int:
    return max(request.sampling.max_new_tokens for request in requests)
