"""The kernels against the definition in float64; without a GPU under Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from tests.tiny import VOCAB, tiny_model
from verl.models import token_log_probs
from verl.models.causal_lm import CausalLM
from verl.models.log_prob_kernels import Scale, head_gradient, token_statistics
from verl.models.token_log_probs import log_probs_and_entropy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALES = [Scale(), Scale(temperature=0.7), Scale(scale=0.25), Scale(softcap=5.0), Scale(0.5, 3.0, 1.3)]


def definition(raw: torch.Tensor, targets: torch.Tensor, scale: Scale) -> tuple[torch.Tensor, torch.Tensor]:
    logits = raw * scale.scale
    if scale.softcap is not None:
        logits = torch.tanh(logits / scale.softcap) * scale.softcap
    every = (logits / scale.temperature).log_softmax(-1)
    return every.gather(-1, targets[:, None])[:, 0], -torch.special.xlogy(every.exp(), every.exp()).sum(-1)


@pytest.mark.parametrize("vocab_size", [33, 4100])
@pytest.mark.parametrize(
    "scale, dtype",
    [*((scale, torch.float32) for scale in SCALES), (SCALES[0], torch.bfloat16), (SCALES[-1], torch.bfloat16)],
)
def test_values_and_gradients_equal_the_definition(scale: Scale, vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    raw = (6 * torch.randn(5, vocab_size, generator=generator) + 40).to(DEVICE, dtype)
    targets = torch.randint(vocab_size, (5,), generator=generator).to(DEVICE)
    to_log_prob, to_entropy = torch.randn(2, 5, generator=generator).to(DEVICE)
    exact = raw.double().requires_grad_()
    log_probs, entropy = definition(exact, targets, scale)
    found_log_probs, found_entropy, log_sum = token_statistics(raw, targets, scale)
    torch.testing.assert_close(found_log_probs.double(), log_probs.detach(), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(found_entropy.double(), entropy.detach(), atol=2e-5, rtol=1e-5)
    for weights in ((to_log_prob, None), (None, to_entropy), (to_log_prob, to_entropy)):
        total = sum((w * value).sum() for w, value in zip(weights, (log_probs, entropy), strict=True) if w is not None)
        (expected,) = torch.autograd.grad(total, exact, retain_graph=True)
        found = head_gradient(raw, targets, found_entropy, log_sum, *weights, scale)
        assert found.dtype == dtype
        coarse = dtype == torch.bfloat16
        torch.testing.assert_close(
            found.double(), expected, atol=1e-4 if coarse else 1e-5, rtol=8e-3 if coarse else 1e-4
        )


def test_rows_that_lie_apart() -> None:
    raw = torch.randn(4, 100, device=DEVICE)
    targets = torch.tensor([1, 2], device=DEVICE)
    whole = token_statistics(raw[::2].contiguous(), targets, Scale())
    for found, expected in zip(token_statistics(raw[::2], targets, Scale()), whole, strict=True):
        assert torch.equal(found, expected)


def test_words_that_are_ruled_out_count_for_nothing() -> None:
    raw, targets = torch.randn(2, 50, device=DEVICE), torch.tensor([0, 1], device=DEVICE)
    shut = torch.cat([raw, torch.full_like(raw, -torch.inf)], -1)
    for found, expected in zip(
        token_statistics(shut, targets, Scale()), token_statistics(raw, targets, Scale()), strict=True
    ):
        torch.testing.assert_close(found, expected)
    _, entropy, log_sum = token_statistics(shut, targets, Scale())
    grad = head_gradient(shut, targets, entropy, log_sum, None, torch.ones(2, device=DEVICE), Scale())
    assert grad.isfinite().all() and (grad[:, 50:] == 0).all()


def test_a_nan_shows() -> None:
    raw = torch.randn(2, 50, device=DEVICE)
    raw[1, 7] = torch.nan
    log_probs, entropy, _ = token_statistics(raw, torch.tensor([0, 1], device=DEVICE), Scale())
    assert log_probs.isnan().tolist() == entropy.isnan().tolist() == [False, True]


def test_no_rows() -> None:
    raw, none = torch.zeros(0, 50, device=DEVICE), torch.zeros(0, dtype=torch.int64, device=DEVICE)
    log_probs, entropy, log_sum = token_statistics(raw, none, Scale())
    assert log_probs.shape == entropy.shape == (0,)
    assert head_gradient(raw, none, entropy, log_sum, log_probs, None, Scale()).shape == (0, 50)


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_a_network_gives_the_same_with_and_without_them(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = CausalLM(tiny_model(family).to(DEVICE))
    monkeypatch.setattr(token_log_probs, "CHUNK_ELEMENTS", 3 * VOCAB)
    states, targets = torch.randn(8, 32, device=DEVICE), torch.randint(0, VOCAB, (8,), device=DEVICE)
    found = []
    for has_kernels in (False, True):
        monkeypatch.setattr(token_log_probs, "_has_kernels", lambda hidden, has=has_kernels: has)
        hidden = states.clone().requires_grad_()
        log_probs, entropy = log_probs_and_entropy(lm, hidden, targets, 0.7, True)
        (log_probs.sum() + 0.3 * entropy.sum()).backward()
        found.append((log_probs.detach(), entropy.detach(), hidden.grad, lm.head.weight.grad.clone()))
        lm.head.weight.grad = None
    for plain, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-4)
