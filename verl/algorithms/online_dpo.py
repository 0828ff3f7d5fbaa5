"""Online DPO: the best and the worst of a prompt's own responses are the pair that DPO learns from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from verl.algorithms.base import AlgorithmConfig, Loss, OnPolicyAlgorithm
from verl.algorithms.credit import counted_rows
from verl.algorithms.dpo import DPO, DPOConfig
from verl.algorithms.group import group_stats
from verl.algorithms.preference import PreferenceConfig
from verl.batch import Batch
from verl.common.errors import ShapeError


class OnlineDPOConfig(PreferenceConfig):
    """Keys of online DPO."""

    name: Literal["online_dpo"] = "online_dpo"
    """Entry of the algorithm table."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """DPO's logistic loss, or IPO's squared distance, which doesn't grow where every pair is told apart."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """cDPO: the share of pairs that the reward is believed to have the wrong way round. Of the sigmoid loss."""
    max_generations: int = Field(default=1, ge=1)
    """Batches of prompts that a step draws at most, until it has `trainer.prompts_per_step` pairs; 1 makes do with
    those of the first batch."""

    def ineffective_keys(self) -> list[str]:
        """As DPO's."""
        return _offline(self).ineffective_keys()


class OnlineDPO(OnPolicyAlgorithm[OnlineDPOConfig]):
    """DPO on responses of the policy itself, judged by a reward.

    Of the responses to a prompt the one with the highest score is chosen and the one with the lowest is rejected, of
    equals the first; the others are not trained on. A group whose scores are equal up to float32 rounding, or with
    fewer than two responses that count, makes no pair and is dropped. Responses whose reward failed, that were given
    up or that have no sampled token don't count. The loss is ``DPO``'s, at the temperature of the sampler.
    Source: Guo et al. 2024, arXiv:2402.04792, algorithm 1, with a reward for the annotator; best against worst of a
    group: Yuan et al. 2024, arXiv:2401.10020, section 2.3.
    """

    Config: ClassVar[type[AlgorithmConfig]] = OnlineDPOConfig
    min_group_size: ClassVar[int] = 2

    def __init__(self, config: OnlineDPOConfig) -> None:
        super().__init__(config)
        self._dpo = DPO(_offline(config))

    @property
    def needs(self) -> frozenset[str]:
        """The reference's log-probs."""
        return frozenset({"reference"})

    @property
    def trains(self) -> tuple[str, ...]:
        """The actor."""
        return self._dpo.trains

    @property
    def max_generations(self) -> int:
        """As configured."""
        return self.config.max_generations

    def keeps(self, batch: Batch) -> Tensor:
        """[B] bool: the chosen and the rejected row of each group that makes a pair."""
        keep = torch.zeros(len(batch), dtype=torch.bool)
        for rows in best_and_worst(batch):
            keep[rows] = True
        return keep

    def advantages(self, batch: Batch) -> dict[str, float]:
        """Write ``pair_id`` and ``is_chosen`` of what ``keeps`` kept; there are no advantages. Raises ShapeError for
        rows that aren't pairs."""
        chosen, rejected = best_and_worst(batch)
        if len(chosen) + len(rejected) != len(batch):
            raise ShapeError(
                f"{len(batch)} rows make {len(chosen)} pairs: leave out the rows that keeps() doesn't keep"
            )
        is_chosen = torch.zeros(len(batch), dtype=torch.bool)
        is_chosen[chosen] = True
        batch.put("pair_id", batch["group_id"])
        batch.put("is_chosen", is_chosen)
        if not len(chosen):
            return {"algorithm/pairs": 0.0}
        gap = (batch["scores"][chosen] - batch["scores"][rejected]).double()
        return {"algorithm/pairs": float(len(chosen)), "algorithm/score_gap/mean": float(gap.mean())}

    def actor_loss(self, log_probs: Tensor, entropy: Tensor | None, columns: Mapping[str, Tensor]) -> Loss:
        """As DPO's."""
        return self._dpo.actor_loss(log_probs, entropy, columns)


def best_and_worst(batch: Batch) -> tuple[Tensor, Tensor]:
    """[P] and [P] int64: the row of the highest and of the lowest score of each group that has two that differ."""
    scores, group_id = batch["scores"], batch["group_id"].to(batch["scores"].device)
    has_tokens = batch.padded("response_mask").bool().any(1).to(scores.device)
    keep = counted_rows(batch) & has_tokens
    stats = group_stats(scores, group_id, keep)
    differs = keep & (stats.size > 1) & ~stats.is_equal
    sides = [_first_of_each(torch.where(differs, sign * scores, -torch.inf), stats.index, differs) for sign in (1, -1)]
    return sides[0], sides[1]


def _first_of_each(values: Tensor, index: Tensor, counts: Tensor) -> Tensor:
    """The row of the largest of ``values`` [B] in each group ``index`` [B] with a row that ``counts``; the first of
    equals."""
    order = values.argsort(descending=True, stable=True)
    order = order[index[order].argsort(stable=True)]
    order = order[counts[order]]
    groups = index[order]
    is_first = torch.ones_like(groups, dtype=torch.bool)
    is_first[1:] = groups[1:] != groups[:-1]
    return order[is_first].cpu()


def _offline(config: OnlineDPOConfig) -> DPOConfig:
    """The keys of the loss."""
    shared = {name: getattr(config, name) for name in config.model_fields_set & set(DPOConfig.model_fields) - {"name"}}
    return DPOConfig(**shared)
