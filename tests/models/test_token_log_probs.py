from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny import VOCAB, tiny_model
from verl.models.causal_lm import CausalLM
from verl.models.token_log_probs import log_probs_and_entropy


def plain(lm: CausalLM, hidden: torch.Tensor, targets: torch.Tensor, temperature: float):
    every = (lm.logits(hidden) / temperature).log_softmax(-1)
    return every.gather(-1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (1.0, 0.3), (0.0, 1.0)])
@pytest.mark.parametrize("chunk", [2**27, 3 * VOCAB])
def test_values_and_gradients_equal_the_plain_formula(
    family: str, temperature: float, weights: tuple[float, float], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soft-capped and scaled heads too: the closed-form gradient stops at the head's own output."""
    monkeypatch.setattr("verl.models.token_log_probs.CHUNK_ELEMENTS", chunk)
    lm = CausalLM(tiny_model(family))
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(8, 32, generator=generator)
    targets = torch.randint(0, VOCAB, (8,), generator=generator)
    scale = torch.randn(8, generator=generator)
    found = []
    for function in (plain, lambda *a: log_probs_and_entropy(*a, entropy_gradient=weights[1] > 0)):
        hidden = states.clone().requires_grad_()
        log_probs, entropy = function(lm, hidden, targets, temperature)
        (scale * (weights[0] * log_probs + weights[1] * entropy)).sum().backward()
        found.append((log_probs.detach(), entropy.detach(), hidden.grad, lm.head.weight.grad.clone()))
        lm.head.weight.grad = None
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_entropy_has_no_gradient_unless_asked_for() -> None:
    lm = CausalLM(tiny_model("llama"))
    hidden = torch.randn(2, 32, requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(lm, hidden, torch.tensor([1, 2]), 1.0, False)
    assert log_probs.requires_grad and not entropy.requires_grad


def test_no_tokens_give_empty_numbers_and_zero_gradients() -> None:
    lm = CausalLM(tiny_model("llama"))
    hidden = torch.randn(0, 32, requires_grad=True)
    log_probs, _ = log_probs_and_entropy(lm, hidden, torch.zeros(0, dtype=torch.int64), 1.0, False)
    log_probs.sum().backward()
    assert log_probs.shape == (0,) and lm.head.weight.grad.abs().max() == 0


def test_a_frozen_head_takes_no_gradient() -> None:
    lm = CausalLM(tiny_model("llama"))
    lm.head.weight.requires_grad_(False)
    hidden = torch.randn(3, 32, requires_grad=True)
    log_probs, _ = log_probs_and_entropy(lm, hidden, torch.tensor([1, 2, 3]), 1.0, False)
    log_probs.sum().backward()
    assert hidden.grad is not None and lm.head.weight.grad is None


def peak_bytes(lm: CausalLM, tokens: int) -> int:
    """Most memory that stood allocated at once on the CPU in a forward and a backward pass of the loss."""
    hidden = torch.randn(tokens, 32, requires_grad=True)
    targets = torch.arange(tokens) % lm.vocab_size
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        log_probs, entropy = log_probs_and_entropy(lm, hidden, targets, 0.7, True)
        (log_probs.sum() - entropy.sum()).backward()
    kineto = profile.profiler.kineto_results.events()
    steps = sorted((e.start_ns(), e.nbytes()) for e in kineto if e.name() == "[memory]")
    assert steps, "the profiler saw no allocation"
    return max(accumulate(size for _, size in steps))


def test_peak_memory_is_that_of_a_chunk_whatever_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab, chunk_tokens = 4000, 64
    config = AutoConfig.for_model(
        "llama", vocab_size=vocab, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        tie_word_embeddings=False,
    )  # fmt: skip
    lm = CausalLM(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    monkeypatch.setattr("verl.models.token_log_probs.CHUNK_ELEMENTS", vocab * chunk_tokens)
    chunk, head, states = vocab * chunk_tokens * 4, vocab * 32 * 4, 1600 * 32 * 4
    few, many = (peak_bytes(lm, tokens) for tokens in (128, 1600))
    assert many - few < 3 * states, "more tokens cost their hidden states, not their logits"
    assert many < 3 * chunk + 3 * head + 2 * states, "no chunk stands beside the next"
