"""An unmodified Hugging Face causal language model, seen as a backbone and an output head.

Rollout and training both run the model through this view: packed token ids in, hidden states out, logits only where
somebody asks for them. It knows nothing of losses, sampling or devices.

Shape letters: N packed tokens, M chosen positions, C hidden, V vocab.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.common.errors import UnsupportedModel
from verl.models.attention import ATTENTION, Attention, PackedAttention


class CausalLM:
    """The two halves of ``module``, which keeps its parameters; its attention is swapped for this library's.

    Raises UnsupportedModel, by name, when the halves don't give the module's own logits: an output head with a step
    that we don't know would make the policy that learns another one than the module that is saved.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module
        config = module.config.get_text_config()
        self.name: str = config.model_type
        backbone, head = module.get_decoder(), module.get_output_embeddings()
        if head is None or backbone is None or backbone is module:
            raise UnsupportedModel(f"{self.name!r} ({type(module).__name__}) is no causal language model with a head")
        self.backbone: nn.Module = backbone
        self.head: nn.Module = head
        self.vocab_size = int(config.vocab_size)
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.logit_scale = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
        own = None
        if module.config._attn_implementation != ATTENTION:
            module.set_attn_implementation("eager")  # the definition: some kernels leave out a model's softcap
            own = _own_forward(module, backbone)
        module.set_attn_implementation(ATTENTION)
        _switch_dropout_off(module)
        if own is not None:
            self._check_against(*own)

    def hidden(self, input_ids: Tensor, position_ids: Tensor, attention: Attention) -> Tensor:
        """input_ids [N], position_ids [N] counted from each row's own start; returns the last hidden states [N, C]."""
        out = self.backbone(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            attention_mask=None,
            attention=attention,
            use_cache=False,
        )
        states: Tensor = out.last_hidden_state[0]
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, C]; returns float32 logits [M, V], as the module's own forward computes them."""
        logits: Tensor = self.head(hidden).float()
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    @torch.no_grad()
    def _check_against(self, own_hidden: Tensor, own_logits: Tensor) -> None:
        """The head on the module's own states, then the whole on the same ids; looser where rounding is coarse."""
        ids = _probe_ids(self.module)
        attention = PackedAttention(torch.tensor([len(ids)]), ids.device)
        ours = self.logits(self.hidden(ids, torch.arange(len(ids), device=ids.device), attention))
        is_exact = own_hidden.dtype == torch.float32
        for part, logits, limit in (
            ("output head", self.logits(own_hidden), 1e-3 if is_exact else 0.05),
            ("attention", ours, 1e-3 if is_exact else 0.5),
        ):
            error = float((logits - own_logits).std() / own_logits.std().clamp(min=1e-6))
            if not error < limit:
                raise UnsupportedModel(
                    f"{self.name!r} ({type(self.module).__name__}): its {part} has a step that isn't supported; "
                    f"packed, it gives other logits than the module itself (relative difference {error:.2g})"
                )


@torch.no_grad()
def _own_forward(module: PreTrainedModel, backbone: nn.Module) -> tuple[Tensor, Tensor]:
    """Hidden states [N, C] and float32 logits [N, V] of the module's own forward on a few tokens."""
    ids = _probe_ids(module)
    training = {part: part.training for part in module.modules()}
    module.eval()
    hidden: Tensor = backbone(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    logits: Tensor = module(input_ids=ids[None], use_cache=False).logits[0].float()
    for part, was_training in training.items():
        part.training = was_training
    return hidden, logits


def _probe_ids(module: PreTrainedModel) -> Tensor:
    vocab = int(module.config.get_text_config().vocab_size)
    device = next(module.parameters()).device
    return torch.arange(7, 15, device=device) % vocab


def _switch_dropout_off(module: nn.Module) -> None:
    """Dropout would make the policy that learns another one than the policy that sampled."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
