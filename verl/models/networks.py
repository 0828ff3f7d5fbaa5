"""What a training engine runs: packed rows in, one number for each response token out.

``PolicyNetwork`` gives log-probs and entropy, ``ValueNetwork`` values. Both are thin over ``CausalLM``.

Shape letters: N packed tokens, M response tokens of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.models.attention import Attention
from verl.models.causal_lm import CausalLM
from verl.models.token_log_probs import log_probs_and_entropy


@dataclass(frozen=True)
class PackedRows:
    """Prompt + response rows laid end to end.

    input_ids     [N] int64
    position_ids  [N] int64, from 0 in each row
    attention     the object every layer calls
    predict_at    [M] int64: the packed position whose hidden state predicts each response token
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


class PolicyNetwork:
    """Log-probs of the response tokens under the tempered distribution that the sampler draws from.

    temperature  divides the logits, as in rollout
    """

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
