"""What a training engine runs: packed rows in, one number for each response token out.

``PolicyNetwork`` gives log-probs and entropy, ``ValueNetwork`` values, ``ScoreNetwork`` a reward model's scores. All
are thin over ``CausalLM``.

Shape letters: N packed tokens, M response tokens of all rows.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from verl.common.errors import UnsupportedModel
from verl.models.attention import Attention
from verl.models.causal_lm import CausalLM
from verl.models.token_log_probs import log_probs_and_entropy


@dataclass(frozen=True)
class PackedRows:
    """Prompt + response rows laid end to end.

    input_ids     [N] int64
    position_ids  [N] int64, from 0 in each row
    attention     the object every layer calls
    predict_at    [M] int64: the packed position whose hidden state each response token's number is read from: the one
                  before it, which predicts it, or its own (see ``Network.offset``)
    targets       [M] int64: the response tokens
    """

    input_ids: Tensor
    position_ids: Tensor
    attention: Attention
    predict_at: Tensor
    targets: Tensor


class Network(Protocol):
    """A module and how to run it on packed rows."""

    @property
    def offset(self) -> int:
        """From a response token to the position that its number is read from: -1 is the one before it, 0 its own."""
        ...

    @property
    def lm(self) -> CausalLM:
        """The backbone and head that it runs."""
        ...

    @property
    def module(self) -> nn.Module:
        """Holds the parameters."""
        ...

    def __call__(self, rows: PackedRows, entropy: bool = False) -> dict[str, Tensor]:
        """Named outputs, each [M] float32."""
        ...

    def hidden(self, rows: PackedRows) -> Tensor:
        """What the backbone gives, [N, C]."""
        ...


def decoder_layers(backbone: nn.Module) -> list[nn.Module]:
    """The decoder layers that are here: a pipeline stage has stand-ins for the others."""
    lists = [child for child in backbone.children() if isinstance(child, nn.ModuleList)]
    return [layer for layers in lists for layer in layers if next(layer.parameters(), None) is not None]


class PolicyNetwork:
    """Log-probs of the response tokens under the tempered distribution that the sampler draws from.

    temperature  divides the logits, as in rollout
    """

    offset = -1

    def __init__(self, lm: CausalLM, temperature: float = 1.0) -> None:
        self.lm, self.temperature = lm, temperature
        self.module: nn.Module = lm.module

    def __call__(self, rows: PackedRows, entropy: bool = False) -> dict[str, Tensor]:
        hidden = self.hidden(rows)[rows.predict_at]
        log_probs, entropies = log_probs_and_entropy(self.lm, hidden, rows.targets, self.temperature, entropy)
        return {"log_probs": log_probs, "entropy": entropies}

    def hidden(self, rows: PackedRows) -> Tensor:
        return self.lm.hidden(rows.input_ids, rows.position_ids, rows.attention)


class ValueNetwork:
    """A backbone with a scalar head: the expected return before each response token is sampled."""

    offset = -1

    def __init__(self, module: PreTrainedModel) -> None:
        self.lm = CausalLM(module)
        self.module = ValueModule(self.lm.backbone, module.config.get_text_config().hidden_size)

    def __call__(self, rows: PackedRows, entropy: bool = False) -> dict[str, Tensor]:
        hidden = self.hidden(rows)[rows.predict_at]
        return {"values": self.module.value_head(hidden)[:, 0].float()}

    def hidden(self, rows: PackedRows) -> Tensor:
        return self.lm.hidden(rows.input_ids, rows.position_ids, rows.attention)


class ValueModule(nn.Module):
    """Holds the parameters of a value network; the head starts at zero, so values do."""

    def __init__(self, backbone: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.backbone = backbone
        like = next(backbone.parameters())
        self.value_head = nn.Linear(hidden_size, 1, dtype=like.dtype, device=like.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)


class ScoreNetwork:
    """A reward model: at each response token the score of the row up to and with it; the last one is the row's.

    ``module`` is transformers' own sequence classifier of one label over the backbone, so that a checkpoint is a folder
    that ``AutoModelForSequenceClassification`` loads. Its head starts at zero, so scores do.
    Raises UnsupportedModel for a model that transformers has no such classifier of.
    """

    offset = 0

    def __init__(self, lm: CausalLM) -> None:
        self.lm = lm
        self.module: Any = _classifier(lm)

    def __call__(self, rows: PackedRows, entropy: bool = False) -> dict[str, Tensor]:
        hidden = self.hidden(rows)[rows.predict_at]
        return {"scores": self.module.score(hidden)[:, 0].float()}

    def hidden(self, rows: PackedRows) -> Tensor:
        return self.lm.hidden(rows.input_ids, rows.position_ids, rows.attention)


def _classifier(lm: CausalLM) -> PreTrainedModel:
    """transformers' classifier of one label on the very backbone of ``lm``."""
    config = copy.deepcopy(lm.module.config)
    config.num_labels = 1
    try:
        with torch.device("meta"):
            made = AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:  # no such class
        raise UnsupportedModel(
            f"{lm.name!r} has no sequence classifier in transformers to be a reward model"
        ) from error
    parts = {name: part for name, part in made.named_children() if name != made.base_model_prefix}
    if [*parts] != ["score"] or not isinstance(parts["score"], nn.Linear):
        raise UnsupportedModel(
            f"{type(made).__name__} scores with {', '.join(parts) or 'nothing'}, not with one linear layer named score"
        )
    like = next(lm.backbone.parameters())
    made.score = nn.Linear(parts["score"].in_features, 1, bias=False, dtype=like.dtype, device=like.device)
    nn.init.zeros_(made.score.weight)
    setattr(made, made.base_model_prefix, lm.backbone)
    classifier: PreTrainedModel = made.eval()
    return classifier
