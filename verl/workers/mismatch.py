"""An estimate of the policy's KL from the reference, from prompts that meet answers to other prompts.

In comes a batch whose examples know such an answer; one number for all its rows goes out. Knows nothing of losses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.batch import Batch
from verl.data.examples import answers_batch
from verl.workers.starting_policy import StartingPolicy


class MismatchedKL:
    """Measures the policy on mismatched answers, under the weights before the update."""

    name = "kl_estimate"
    writes = "kl_estimate"

    def __init__(self, engine: Any, reference: StartingPolicy) -> None:
        self.engine, self.reference = engine, reference

    def infer(self, batch: Batch) -> None:
        """Write ``kl_estimate``, the same for every row."""
        mismatched = answers_batch([row["example"].mismatched for row in batch.rows])
        self.reference.infer(mismatched)
        mismatched.put("old_log_probs", self.engine.infer(mismatched, "log_probs"))
        batch.put(self.writes, kl_estimate(mismatched).expand(len(batch)))


def kl_estimate(mismatched: Batch) -> Tensor:
    """Scalar: the mean over rows of the sum over tokens of log-prob minus the reference's, at least 0.

    mismatched  prompts with answers to other prompts; old_log_probs, ref_log_probs, response_mask
    Rows without a token that counts are left out; 0 where none has one.
    Source: Ethayarajh et al. 2024, arXiv:2402.01306, section 4.1 (z_ref).
    """
    mask = mismatched.padded("response_mask")
    ratio = torch.where(mask, mismatched.padded("old_log_probs") - mismatched.padded("ref_log_probs"), 0.0).sum(1)
    counts = mask.any(1)
    return (ratio[counts].sum() / counts.sum().clamp(min=1)).clamp(min=0)
