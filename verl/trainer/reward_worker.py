"""The reward model of a run on workers: on devices of its own, or beside the actor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from verl.controller import Place, WorkerGroup, dispatch, split_rows
from verl.rewards.base import RewardItem
from verl.trainer.reward_model import RewardModel, load_classifier


class RewardWorker:
    """A whole reward model on each rank, which scores the rank's share of the rows.

    where      folder or hub name
    tokenizer  for text; None where the sampled ids are scored
    """

    def __init__(self, place: Place, where: str, tokenizer: PreTrainedTokenizerBase | None) -> None:
        device = torch.device(place.device)
        self._model = RewardModel(load_classifier(where, device), tokenizer, device=device)

    @dispatch(split_rows)
    def score(self, items: list[RewardItem]) -> list[Any]:
        """A score or a failure an item."""
        return list(self._model.score_items(items))


class RemoteRewardModel:
    """The reward model whose workers are ``group``."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def score_items(self, items: Sequence[RewardItem]) -> list[Any]:
        """As ``RewardModel.score_items``; of a row only what the model reads goes to the workers."""
        scores: list[Any] = self._group.score([replace(item, ground_truth=None, row={}) for item in items]).get()
        return scores
