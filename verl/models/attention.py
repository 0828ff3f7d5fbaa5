"""The one attention function of this library, plugged into unmodified Hugging Face modules.

A module built with ``attn_implementation=ATTENTION`` calls ``attend`` in every layer with the ``attention`` object
that was passed to its forward: ``PackedAttention`` here for training, the paged one of the rollout engine for
generation. So the module that samples is the module that learns; only this object differs.

Shape letters: N packed tokens, H query heads, K key/value heads, D head dim, B sequences, T padded tokens.
"""

from __future__ import annotations

import inspect
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl.common.errors import VerlError
from verl.common.transfer import to_device

ATTENTION = "verl"


class Scoring(NamedTuple):
    """How a layer turns products of queries and keys into weights.

    scale    factor of the products
    window   tokens that a query sees, itself among them; None for all before it
    softcap  bound of the scaled products, by tanh (Gemma 2)
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


class Attention(Protocol):
    """What a forward pass carries to every layer."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Causal attention of packed tokens.

        query [N, H, D], key [N, K, D], value [N, K, D]; returns [N, H, D].
        """
        ...


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention: Attention | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """The entry that transformers calls: query [1, H, N, D], key and value [1, K, N, D]; returns [1, N, H, D].

    Raises VerlError for a module that is called as if it weren't under this library's attention.
    """
    if attention is None:
        raise VerlError(
            "the model is in a trainer, which runs it under an attention of its own: close() the trainer first, or "
            "call model.set_attn_implementation('sdpa')"
        )
    assert query.shape[0] == 1, "rows are packed into one"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]  # set by every transformers attention layer
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = attention(layer, q, k, v, Scoring(scale, sliding_window, softcap))
    return out.unsqueeze(0), None


# without a mask entry of that name transformers makes no mask; layers that are compiled call it as it is
ALL_ATTENTION_FUNCTIONS.register(ATTENTION, torch.compiler.disable(attend))


class PackedAttention:
    """Causal attention within each sequence of a packed row: block-diagonal, no mask of [N, N].

    On CUDA in half precision torch's variable-length kernel reads the packed tensors as they are. Elsewhere sequences
    of similar length are laid side by side, padded on the right, where causal attention never looks.

    lengths  [B] tokens of each sequence; they sum to N
    """

    def __init__(self, lengths: Tensor, device: torch.device) -> None:
        self.lengths: list[int] = lengths.tolist()
        self.max_length = max(self.lengths, default=0)
        self.device = device
        self.offsets = to_device(pad(lengths.cumsum(0), (1, 0)).int(), device)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and scoring.softcap is None:
            size = self.max_length
            return varlen(query, key, value, self.offsets, self.offsets, size, size, scoring)
        out = torch.empty_like(query)
        for block in self._blocks:
            q, k, v = (block.spread(x) for x in (query, key, value))
            out = out.index_copy(0, block.source, block.gather(dense_causal(q, k, v, scoring)))
        return out

    @cached_property
    def _blocks(self) -> list[_Block]:
        """Sequences in order of length, cut where padding would more than double the work."""
        order = sorted((i for i, n in enumerate(self.lengths) if n), key=lambda i: self.lengths[i])
        groups: list[list[int]] = []
        tokens = 0
        for row in order:
            n = self.lengths[row]
            if groups and (len(groups[-1]) + 1) * n <= 2 * (tokens + n):
                groups[-1].append(row)
                tokens += n
            else:
                groups.append([row])
                tokens = n
        starts = [0, *accumulate(self.lengths)]
        return [_Block([(starts[i], self.lengths[i]) for i in group], self.device) for group in groups]


class _Block:
    """Some sequences of a packed row as one right-padded tensor [G, L, ...]."""

    def __init__(self, spans: list[tuple[int, int]], device: torch.device) -> None:
        self.rows, self.width = len(spans), max(length for _, length in spans)
        source = [start + i for start, length in spans for i in range(length)]
        target = [g * self.width + i for g, (_, length) in enumerate(spans) for i in range(length)]
        self.source = torch.tensor(source, device=device)
        self.target = torch.tensor(target, device=device)

    def spread(self, packed: Tensor) -> Tensor:
        """[N, H, D] to [G, L, H, D], zeros right of each sequence."""
        padded = packed.new_zeros(self.rows * self.width, *packed.shape[1:])
        padded = padded.index_copy(0, self.target, packed.index_select(0, self.source))
        return padded.view(self.rows, self.width, *packed.shape[1:])

    def gather(self, padded: Tensor) -> Tensor:
        """[G, L, H, D] to the sequences' own tokens, end to end."""
        return padded.reshape(-1, *padded.shape[2:]).index_select(0, self.target)


_VARLEN_HAS_GQA = False
try:
    from torch.nn.attention.varlen import varlen_attn

    _VARLEN_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
except ImportError:  # a CPU build of torch may lack it; CUDA builds from 2.11 have it
    pass


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    max_query: int,
    max_key: int,
    scoring: Scoring,
) -> Tensor:
    """torch's variable-length flash attention, causal; offsets are int32 prefix sums on the device.

    Grouped query heads go in as they are: the kernel of torch 2.11 takes them, later ones want to be told.
    """
    assert scoring.softcap is None, "that kernel has none"
    before = -1 if scoring.window is None else scoring.window - 1
    kwargs: dict[str, Any] = {"scale": scoring.scale, "window_size": (before, 0)}
    if _VARLEN_HAS_GQA:
        kwargs["enable_gqa"] = True
    q, k, v = query.contiguous(), key.contiguous(), value.contiguous()
    out = varlen_attn(q, k, v, query_offsets, key_offsets, max_query, max_key, **kwargs)
    assert isinstance(out, Tensor)  # without the log-sum-exp, which wasn't asked for
    return out


def dense_causal(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Causal attention of sequences side by side: query [G, L, H, D], key and value [G, L, K, D].

    Through SDPA, or plain matrix products where a softcap forbids it.
    """
    length, window = query.shape[1], scoring.window
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    band = causal_band(length, window, query.device) if window is not None and window < length else None
    if scoring.softcap is None:
        out: Tensor = scaled_dot_product_attention(
            q, k, v, attn_mask=band, is_causal=band is None, scale=scoring.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    else:
        mask = causal_band(length, None, query.device) if band is None else band
        out = softcapped_attention(q, k, v, mask, scoring.scale, scoring.softcap)
    return out.transpose(1, 2)


def softcapped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float
) -> Tensor:
    """Attention whose logits go through ``softcap * tanh(x / softcap)`` (Gemma 2); [..., H, T, D], mask True = keep."""
    groups = query.shape[-3] // key.shape[-3]
    key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    logits = softcap * torch.tanh(query @ key.transpose(-1, -2) * scale / softcap)
    return logits.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32).to(query.dtype) @ value


def causal_band(length: int, window: int | None, device: torch.device) -> Tensor:
    """[length, length] bool: True for the token itself and the ``window`` - 1 before it (all, without a window)."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return mask if window is None else mask.triu(1 - window)
