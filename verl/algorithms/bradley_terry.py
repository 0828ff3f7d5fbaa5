"""Bradley-Terry: a reward model learns to score the chosen response of a pair above the rejected one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from verl.algorithms.base import Algorithm, AlgorithmConfig, Loss
from verl.algorithms.clipped_policy import response_mask
from verl.algorithms.masked import masked_sum
from verl.algorithms.pairs import pair_rows
from verl.algorithms.preference import mean_of
from verl.common.errors import ShapeError


class BradleyTerryConfig(AlgorithmConfig):
    """Keys of reward-model training."""

    name: Literal["bradley_terry"] = "bradley_terry"
    """Entry of the algorithm table."""
    centre_coef: float = Field(default=0.0, ge=0)
    """Weight of the square of a pair's summed scores, which keeps scores near 0; 0.01 is usual, 0 leaves their level
    free."""


class BradleyTerry(Algorithm[BradleyTerryConfig]):
    """Reward-model training on pairs.

    loss = -log sigmoid(s_chosen - s_rejected) + centre_coef * (s_chosen + s_rejected)^2, the mean over pairs. The score
    s of a row is the one at its last response token. A pair of which one row has no response token takes no part.
    Source: Ouyang et al. 2022 (InstructGPT), arXiv:2203.02155, eq. 1, with one pair a comparison; the second term:
    Eisenstein et al. 2023, arXiv:2312.09244, section 3.
    """

    Config: ClassVar[type[AlgorithmConfig]] = BradleyTerryConfig
    family: ClassVar[str] = "preference"
    is_paired: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:
        """Nothing beside the pairs."""
        return frozenset()

    @property
    def trains(self) -> tuple[str, ...]:
        """The reward model."""
        return ("reward_model",)

    def score_loss(self, scores: Tensor, columns: Mapping[str, Tensor]) -> Loss:
        """The loss of whole pairs.

        scores   [B, R] float  of each row up to each response token, with gradient
        columns  response_mask [B, R], pair_id [B], is_chosen [B]
        A pair of equal scores is not counted as right. Raises MissingField and ShapeError.
        """
        last, has_score = last_scores(scores, response_mask(columns))
        chosen, rejected = pair_rows(columns)
        counts = has_score[chosen] & has_score[rejected]
        margin = last[chosen] - last[rejected]
        losses = -logsigmoid(margin)
        if self.config.centre_coef > 0:
            losses = losses + self.config.centre_coef * (last[chosen] + last[rejected]).square()
        metrics = {
            "reward_model/loss": mean_of(losses, counts),
            "reward_model/accuracy": mean_of(margin > 0, counts),
            "reward_model/margin": mean_of(margin, counts),
            "reward_model/chosen_score": mean_of(last[chosen], counts),
            "reward_model/rejected_score": mean_of(last[rejected], counts),
        }
        return Loss(masked_sum(losses, counts), counts.sum().float(), metrics)


def last_scores(scores: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """[B] float32: the score at the last place of each row where ``mask``, 0 in a row without one; [B] bool: where
    there is one. Both arguments [B, R]; what stands at other places is not read."""
    if scores.shape != mask.shape:
        raise ShapeError(f"scores are {list(scores.shape)}, the response mask is {list(mask.shape)}")
    places = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, places, -1).amax(1) if mask.shape[1] else places.new_full((len(mask),), -1)
    at_last = mask & (places == last[:, None])
    return masked_sum(scores.float(), at_last, dim=1), last >= 0
