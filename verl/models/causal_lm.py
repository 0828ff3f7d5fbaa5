"""An unmodified Hugging Face causal language model, seen as a backbone and an output head.

Rollout and training both run the model through this view: packed token ids in, hidden states out, logits only where
somebody asks for them. It knows nothing of losses, sampling or devices.

Shape letters: N packed tokens, M chosen positions, C hidden, V vocab.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from verl.common.errors import UnsupportedModel, VerlError
from verl.models.attention import ATTENTION, Attention, PackedAttention, Scoring


class CausalLM:
    """The two halves of ``module``, which keeps its parameters; its attention is swapped for this library's.

    Raises UnsupportedModel, by name, when the halves don't give the module's own logits (an output head with a step
    that we don't know would make the policy that learns another one than the module that is saved), and when a layer
    mixes tokens by other means than this library's attention: rows would read their neighbours. Of an outline, on the
    meta device, there are no numbers to tell either by.
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
        self.logit_scale = (getattr(config, "logit_scale", None) or 1.0) / getattr(config, "logits_scaling", 1.0)
        own = None
        if module.config._attn_implementation != ATTENTION and not next(module.parameters()).is_meta:
            module.set_attn_implementation("eager")  # the definition: some kernels leave out a model's softcap
            try:
                own = _own_forward(module, backbone)
            except TypeError as error:  # what stands at the place of the backbone is something else
                raise self._unsupported(f"its backbone can't be told from its head: {error}") from error
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
        """The head on the module's own states, then the whole on the same rows; looser where rounding is coarse."""
        ours = self._packed_logits(_probe_rows(self.module))
        if not bool(own_logits.isfinite().all()):
            origin = f", those of model.path (read from {self.module.name_or_path!r})," * bool(self.module.name_or_path)
            raise self._unsupported(f"its logits are no finite numbers: its weights{origin} are damaged")
        is_exact = own_hidden.dtype == torch.float32
        for part, logits, limit in (
            ("output head", self.logits(own_hidden), 1e-3 if is_exact else 0.05),
            ("attention", ours, 1e-3 if is_exact else 0.5),
        ):
            error = float((logits - own_logits).std() / own_logits.std().clamp(min=1e-6))
            if not error < limit:
                raise self._unsupported(
                    f"its {part} has a step that isn't supported; packed, it gives other logits than the module "
                    f"itself (relative difference {error:.2g})"
                )

    def _packed_logits(self, rows: list[Tensor]) -> Tensor:
        """Logits of ``rows`` packed. Raises UnsupportedModel unless every layer attends by ours, with its window."""
        positions = torch.cat([torch.arange(len(row), device=row.device) for row in rows])
        attention = _Witness(PackedAttention(torch.tensor([len(row) for row in rows]), positions.device))
        try:
            logits = self.logits(self.hidden(torch.cat(rows), positions, attention))
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except VerlError as error:
            raise self._unsupported("its layers don't hand their attention what this library passes") from error
        except Exception as error:  # a forward of another kind raises what it likes
            raise self._unsupported(f"it can't run packed rows: {type(error).__name__}: {error}") from error
        config = self.module.config.get_text_config()
        layers = int(config.num_hidden_layers)
        if len(attention.windows) != layers:
            raise self._unsupported(
                f"{layers - len(attention.windows)} of its {layers} layers mix tokens by other means than an attention "
                "that can be replaced (recurrent, convolutional or of their own)"
            )
        window = _declared_window(config)
        if window is not None and not any(attention.windows.values()):
            raise self._unsupported(f"its sliding window of {window} tokens is in a mask that packed rows don't have")
        return logits

    def _unsupported(self, reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.name!r} ({type(self.module).__name__}): {reason}")


class _Witness:
    """An attention that notes which layers call it, and with which window."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.windows: dict[int, int | None] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        self.windows[layer] = scoring.window
        return self.attention(layer, query, key, value, scoring)


def _declared_window(config: PretrainedConfig) -> int | None:
    """The sliding window that ``config`` says some layer has, if it is shorter than the longest row."""
    window = getattr(config, "sliding_window", None)
    if not window or window >= (getattr(config, "max_position_embeddings", None) or window + 1):
        return None
    kinds = getattr(config, "layer_types", None)
    return int(window) if kinds is None or "sliding_attention" in kinds else None


@torch.no_grad()
def _own_forward(module: PreTrainedModel, backbone: nn.Module) -> tuple[Tensor, Tensor]:
    """Hidden states [N, C] and float32 logits [N, V] of the module's own forward on each of a few short rows."""
    training = {part: part.training for part in module.modules()}
    module.eval()
    rows = [row[None] for row in _probe_rows(module)]
    hidden = torch.cat([backbone(input_ids=row, use_cache=False).last_hidden_state[0] for row in rows])
    logits = torch.cat([module(input_ids=row, use_cache=False).logits[0].float() for row in rows])
    for part, was_training in training.items():
        part.training = was_training
    return hidden, logits


def _probe_rows(module: PreTrainedModel) -> list[Tensor]:
    """Two rows: one alone wouldn't show that they see each other."""
    vocab = int(module.config.get_text_config().vocab_size)
    device = next(module.parameters()).device
    return [torch.arange(7, 15, device=device) % vocab, torch.arange(20, 26, device=device) % vocab]


def _switch_dropout_off(module: nn.Module) -> None:
    """Dropout and noise would make the policy that learns another one than the policy that sampled.

    Some modules hold a rate as a plain number and apply it as a function.
    """
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name, value in vars(part).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(part, name, 0.0)
