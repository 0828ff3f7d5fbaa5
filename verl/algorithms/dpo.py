"""DPO, with its variants IPO and cDPO: pairs of a better and a worse answer teach the policy without a reward model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from verl.algorithms.base import AlgorithmConfig, Loss, changed
from verl.algorithms.pairs import pair_rows
from verl.algorithms.preference import (
    Preference,
    PreferenceConfig,
    entropy_metric,
    is_win,
    log_ratios,
    loss_of,
    mean_of,
)


class DPOConfig(PreferenceConfig):
    """Keys of DPO."""

    name: Literal["dpo"] = "dpo"
    """Entry of the algorithm table."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid: DPO's logistic loss. ipo: the squared distance of the margin a token from 1 / (2 beta), which doesn't
    grow without bound where every pair is told apart."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """cDPO: the share of pairs believed to be the wrong way round; 0 trusts all. Of the sigmoid loss."""

    def ineffective_keys(self) -> list[str]:
        """``label_smoothing`` under ipo."""
        if self.loss == "ipo" and changed(self, "label_smoothing"):
            return ["label_smoothing (algorithm.loss is 'ipo', which has none)"]
        return []


class DPO(Preference[DPOConfig]):
    """Direct preference optimisation.

    r       = sum over the response of log_prob - ref_log_prob, of the chosen and of the rejected answer
    sigmoid = -(1 - e) log sigmoid(beta (r_c - r_r)) - e log sigmoid(-beta (r_c - r_r)), e = label_smoothing
    ipo     = (r_c / n_c - r_r / n_r - 1 / (2 beta))^2 with n the answers' lengths in tokens
    The mean over pairs; a pair of which one answer has no token takes no part.
    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; Azar et al. 2023 (IPO), arXiv:2310.12036, eq. 17; Mitchell
    2023 (cDPO), a note on noisy preferences. IPO is written for log-probs of whole answers; we take means over tokens,
    as the field does on its authors' word, so that beta doesn't depend on lengths.
    """

    Config: ClassVar[type[AlgorithmConfig]] = DPOConfig
    is_paired: ClassVar[bool] = True

    def actor_loss(self, log_probs: Tensor, entropy: Tensor | None, columns: Mapping[str, Tensor]) -> Loss:
        """As in Algorithm, on whole pairs: needs ``ref_log_probs``, ``pair_id`` and ``is_chosen``."""
        beta = self.config.beta
        rows = log_ratios(log_probs, columns)
        chosen, rejected = pair_rows(columns)
        counts = (rows.tokens[chosen] > 0) & (rows.tokens[rejected] > 0)
        difference = rows.ratio[chosen] - rows.ratio[rejected]
        if self.config.loss == "ipo":
            per_token = rows.ratio / rows.tokens.clamp(min=1)
            losses = (per_token[chosen] - per_token[rejected] - 1 / (2 * beta)).square()
        else:
            smoothing, margin = self.config.label_smoothing, beta * difference
            losses = -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
        rounding = rows.rounding[chosen] + rows.rounding[rejected]
        metrics = {
            "actor/margin": mean_of(beta * difference, counts),
            "actor/accuracy": mean_of(is_win(difference, rounding), counts),
            "actor/chosen_reward": mean_of(beta * rows.ratio[chosen], counts),
            "actor/rejected_reward": mean_of(beta * rows.ratio[rejected], counts),
            "actor/chosen_log_prob": mean_of(rows.log_prob[chosen], counts),
            "actor/rejected_log_prob": mean_of(rows.log_prob[rejected], counts),
        }
        return loss_of(losses, counts, metrics | entropy_metric(entropy, columns))
