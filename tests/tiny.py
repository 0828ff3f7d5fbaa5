"""Tiny models and tokenizers with random weights, made when a test asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCAB = 64
_COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}
FAMILIES: dict[str, dict[str, object]] = {
    "gpt2": {"n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 256},
    "llama": _COMMON,
    "qwen2": _COMMON,
    "qwen3": {**_COMMON, "head_dim": 16},
    "mistral": {**_COMMON, "num_hidden_layers": 1, "num_attention_heads": 1, "sliding_window": 6, "head_dim": 32},
    "gemma2": {**_COMMON, "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_COMMON, "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16},
    "phi3": _COMMON,
    "olmo2": _COMMON,
    "granite": {**_COMMON, "logits_scaling": 2.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "qwen3_moe": {**_COMMON, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}  # fmt: skip


def tiny_model(
    family: str, seed: int = 0, std: float = 0.3, shape: Mapping[str, object] | None = None
) -> PreTrainedModel:
    """A float32 causal language model of ``family`` in eval mode; ``shape`` overrides keys of its configuration.

    Weights have std 0.3, not 0.02: near-uniform outputs would hide faults.
    """
    keys = {"tie_word_embeddings": False, **FAMILIES[family], **(shape or {})}
    config = AutoConfig.for_model(
        family, vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2, **keys
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    # eager is the definition: SDPA leaves out Gemma 2's soft-cap in transformers 5.17
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(1 + 0.1 * noise if "norm" in name and parameter.dim() == 1 else noise)
    return model.eval()


def word_tokenizer(add_bos: bool = True, chat_template: bool = True) -> PreTrainedTokenizerFast:
    """A word-level tokenizer: ``<pad>``=0 ``<s>``=1 ``</s>``=2 ``[U]``=3 ``[A]``=4 ``hi``=5, then ``w6``..``w62``.

    ``<unk>``=63 stands for every other word.
    Its post-processor adds ``<s>``, and so does its chat template: the pair that doubles BOS when mishandled.
    """
    words = ["<pad>", "<s>", "</s>", "[U]", "[A]", "hi", *(f"w{i}" for i in range(6, VOCAB - 1)), "<unk>"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if add_bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    if chat_template:
        tokenizer.chat_template = (
            "<s> {% for m in messages %}{% if m['role'] == 'user' %}[U] {{ m['content'] }} "
            "{% else %}[A] {{ m['content'] }} </s> {% endif %}{% endfor %}"
            "{% if add_generation_prompt %}[A]{% endif %}"
        )
    return tokenizer


def tiny_folder(folder: Path, family: str = "llama", seed: int = 0, std: float = 0.3) -> Path:
    """Save a tiny model and the word tokenizer as a Hugging Face folder."""
    tiny_model(family, seed, std).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder
