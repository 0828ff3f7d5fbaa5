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
        reference = None
        if module.config._attn_implementation != ATTENTION:
            module.set_attn_implementation("eager")  # the definition: some kernels leave out a model's softcap
            reference = _plain_logits(module)
        module.set_attn_implementation(ATTENTION)
        _switch_dropout_off(module)
        if reference is not None:
            self._check_against(reference)

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

    def _check_against(self, reference: Tensor) -> None:
        ids = _probe_ids(self.module)
        lengths = torch.tensor([len(ids)])
        with torch.no_grad():
            hidden = self.hidden(ids, torch.arange(len(ids), device=ids.device), PackedAttention(lengths, ids.device))
            ours = self.logits(hidden)
        error = float((ours - reference).abs().max() / reference.abs().max().clamp(min=1e-6))
        if not error < (1e-3 if reference.dtype == torch.float32 and hidden.dtype == torch.float32 else 0.1):
            raise UnsupportedModel(
                f"{self.name!r} ({type(self.module).__name__}) computes other logits under packed attention than on "
                f"its own (relative difference {error:.2g}): its attention or output head has a step that isn't "
                "supported"
            )


def _plain_logits(module: PreTrainedModel) -> Tensor:
    """Logits of the module's own forward on a few tokens, float32 [N, V]."""
    ids = _probe_ids(module)
    was_training = module.training
    module.eval()
    with torch.no_grad():
        logits: Tensor = module(input_ids=ids[None], use_cache=False).logits[0].float()
    module.train(was_training)
    return logits


def _probe_ids(module: PreTrainedModel) -> Tensor:
    vocab = int(module.config.get_text_config().vocab_size)
    device = next(module.parameters()).device
    return torch.arange(7, 15, device=device) % vocab


def _switch_dropout_off(module: nn.Module) -> None:
    """Dropout would make the policy that learns another one than the policy that sampled."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
