from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.batches import sampled_batch
from tests.tiny import tiny_model
from verl.common.errors import UnsupportedModel
from verl.engines.packing import pack
from verl.engines.saved_model import save_model
from verl.models.causal_lm import CausalLM
from verl.models.networks import PolicyNetwork, ScoreNetwork, ValueNetwork
from verl.models.token_log_probs import log_probs_and_entropy
from verl.trainer.reward_model import RewardModel

CPU = torch.device("cpu")


def test_entropy_by_hand_and_without_gradient() -> None:
    """Two equal logits among impossible ones: ln 2, each log-prob -ln 2."""
    lm = CausalLM(tiny_model("llama"))
    logits = torch.full((1, 64), -1e4)
    logits[0, 3] = logits[0, 9] = 1.0
    lm.logits = lambda hidden: logits + 0 * hidden.sum()  # type: ignore[method-assign]
    hidden = torch.zeros(1, 32, requires_grad=True)
    log_prob, entropy = log_probs_and_entropy(lm, hidden, torch.tensor([9]), 1.0, False)
    assert log_prob.item() == pytest.approx(-0.693147, abs=1e-6)
    assert entropy.item() == pytest.approx(0.693147, abs=1e-6)
    assert log_prob.requires_grad and not entropy.requires_grad


def test_no_tokens_give_no_numbers_and_a_gradient_of_zero() -> None:
    lm = CausalLM(tiny_model("llama"))
    hidden = torch.zeros(0, 32, requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(lm, hidden, torch.zeros(0, dtype=torch.int64), 1.0, True)
    assert log_probs.shape == entropy.shape == (0,)
    (log_probs.sum() + entropy.sum()).backward()
    assert hidden.grad is not None and hidden.grad.shape == (0, 32)


def test_temperature_divides_logits_not_values() -> None:
    batch = sampled_batch([2, 3], [4, 5])
    cold, warm = (PolicyNetwork(CausalLM(tiny_model("llama")), t)(pack(batch, CPU))["log_probs"] for t in (0.5, 1.0))
    assert not torch.allclose(cold, warm)
    module = tiny_model("llama")
    rows = pack(batch, CPU)
    values = ValueNetwork(module)
    with torch.no_grad():
        values.module.value_head.weight.fill_(0.1)
        values.module.value_head.bias.fill_(2.0)
        hidden = values.lm.hidden(rows.input_ids, rows.position_ids, rows.attention)
        torch.testing.assert_close(values(rows)["values"], hidden[rows.predict_at].sum(-1) * 0.1 + 2.0)


def test_a_value_network_starts_at_zero_and_has_no_language_head() -> None:
    network = ValueNetwork(tiny_model("gpt2"))
    rows = pack(sampled_batch([2, 3], [4, 5]), CPU)
    assert network(rows)["values"].tolist() == [0.0] * 9
    names = [name for name, _ in network.module.named_parameters()]
    assert "value_head.weight" in names and not any("lm_head" in name for name in names)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "qwen3_moe"])
def test_a_score_network_is_the_classifier_that_transformers_saves_and_loads(family: str, tmp_path: Path) -> None:
    """The number at each response token is the classifier's own on the row up to it, whatever stands beside the row."""
    network = ScoreNetwork(CausalLM(tiny_model(family)))
    rows = pack(sampled_batch([2, 3, 1], [4, 1, 2]), CPU, network.offset)
    assert network(rows)["scores"].tolist() == [0.0] * 7
    assert rows.predict_at.tolist() == [2, 3, 4, 5, 9, 11, 12]
    with torch.no_grad():
        network.module.score.weight.copy_(torch.linspace(-1, 1, 32))
    found = network(rows)["scores"].tolist()
    save_model(tmp_path, network.module)
    model = RewardModel(tmp_path, device="cpu")
    ids = rows.input_ids.tolist()
    own = [(0, 3), (0, 4), (0, 5), (0, 6), (6, 10), (10, 12), (10, 13)]
    assert found == pytest.approx(model.score([ids[start:stop] for start, stop in own]), abs=1e-4)
    assert not any("lm_head" in name for name, _ in network.module.named_parameters())


def test_a_model_without_a_classifier_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="granite"):
        ScoreNetwork(CausalLM(tiny_model("granite")))
