from __future__ import annotations

import copy
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.batches import sampled_batch
from tests.tiny import tiny_model
from verl.algorithms import ALGORITHMS
from verl.algorithms.base import Loss
from verl.batch import Batch
from verl.common.errors import ConfigError
from verl.engines.base import Engine, TrainingEngine
from verl.engines.config import EngineConfig, OptimConfig, TrainedConfig
from verl.models.causal_lm import CausalLM
from verl.models.networks import PolicyNetwork, ValueNetwork

CPU = torch.device("cpu")
PROMPTS, RESPONSES = [3, 5, 1, 7, 2, 4], [4, 1, 6, 0, 9, 2]


def training_engine(family: str = "llama", **keys: object) -> TrainingEngine:
    config = TrainedConfig(optim=OptimConfig(lr=1e-3, max_grad_norm=keys.pop("max_grad_norm", None)), **keys)
    return TrainingEngine(PolicyNetwork(CausalLM(tiny_model(family))), config, CPU, "actor")


def grpo_loss(**keys: object):
    kind = ALGORITHMS.load("grpo")
    algorithm = kind(kind.Config(name="grpo", **keys))
    return lambda outputs, columns: algorithm.actor_loss(outputs["log_probs"], outputs["entropy"], columns)


def weights(engine: TrainingEngine) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in engine.network.module.parameters()])


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "gemma2"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_packed_log_probs_equal_each_row_alone(family: str, temperature: float) -> None:
    """H02: a row's numbers depend on no neighbour; learned positions (GPT-2) show what rotary ones hide."""
    model = tiny_model(family)
    batch = sampled_batch(PROMPTS, RESPONSES)
    expected = []
    prompts, responses = batch["prompt_ids"].split(PROMPTS), batch["response_ids"].split(RESPONSES)
    for prompt, response in zip(prompts, responses, strict=True):
        logits = model(torch.cat([prompt, response])[None]).logits[0] / temperature
        at = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
        expected.append(logits[at].log_softmax(-1).gather(-1, response[:, None])[:, 0])
    engine = Engine(PolicyNetwork(CausalLM(model), temperature), EngineConfig(max_tokens_per_micro_batch=12), CPU)
    torch.testing.assert_close(engine.infer(batch, "log_probs"), torch.cat(expected).detach(), atol=1e-5, rtol=0)


def test_tempered_log_prob_by_hand() -> None:
    """H05: logits 2 1 0, id 0: -0.142932 at temperature 0.5, -0.407606 at 1."""
    lm = CausalLM(tiny_model("llama"))
    lm.logits = lambda hidden: torch.tensor([[2.0, 1.0, 0.0]])  # type: ignore[method-assign]
    from verl.models.token_log_probs import log_probs_and_entropy

    for temperature, expected in ((0.5, -0.142932), (1.0, -0.407606)):
        got, _ = log_probs_and_entropy(lm, torch.zeros(1, 32), torch.tensor([0]), temperature, False)
        assert got.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum"])
def test_micro_batch_cut_changes_nothing(aggregation: str) -> None:
    """H04: loss, gradient and weights are the same whatever the token budget."""
    batch, seen = sampled_batch(PROMPTS, RESPONSES), []
    for budget in (1000, 14, 11):
        engine = training_engine(max_tokens_per_micro_batch=budget)
        metrics = engine.update(batch, grpo_loss(loss_aggregation=aggregation), lr=1e-3).result()
        seen.append(
            (metrics["actor/grad_norm"], metrics["actor/policy_loss"], metrics["actor/entropy"], weights(engine))
        )
    for norm, loss, entropy, after in seen[1:]:
        assert norm == pytest.approx(seen[0][0], rel=1e-5)
        assert loss == pytest.approx(seen[0][1], rel=1e-4, abs=1e-7)
        assert entropy == pytest.approx(seen[0][2], rel=1e-5)
        torch.testing.assert_close(after, seen[0][3], atol=1e-4, rtol=0)


def test_gradient_is_divided_once_by_the_global_count() -> None:
    """H04 by hand: per-token losses 1 1 1 1 and 4; token-mean 1.6, never the mean of means 2.5."""

    def loss(outputs, columns) -> Loss:
        mask = columns["response_mask"]
        per_token = torch.where(mask, outputs["log_probs"] * 0 + columns["returns"], 0.0) * scale
        return Loss(per_token.sum(), mask.sum().float(), {"x": (per_token.sum().detach(), mask.sum())})

    for budget in (100, 6, 5):
        engine = training_engine(max_tokens_per_micro_batch=budget)
        scale = engine.network.module.model.norm.weight[0]
        with torch.no_grad():
            scale.fill_(1.0)
        batch = sampled_batch([1, 1], [4, 1])
        batch.put("returns", torch.tensor([1.0, 1.0, 1.0, 1.0, 4.0]))
        metrics = engine.update(batch, loss, lr=0.0).result()
        assert metrics["actor/grad_norm"] == pytest.approx(1.6)
        assert metrics["x"] == pytest.approx(1.6)


def test_gradient_checkpointing_and_chunking_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = sampled_batch(PROMPTS, RESPONSES)
    plain, checkpointed = training_engine(), training_engine(gradient_checkpointing=True)
    first = plain.update(batch, grpo_loss(entropy_coef=0.1), lr=1e-3, entropy=True).result()
    monkeypatch.setattr("verl.models.token_log_probs.CHUNK_ELEMENTS", 64 * 3)
    second = checkpointed.update(batch, grpo_loss(entropy_coef=0.1), lr=1e-3, entropy=True).result()
    assert second["actor/grad_norm"] == pytest.approx(first["actor/grad_norm"], rel=1e-5)
    torch.testing.assert_close(weights(checkpointed), weights(plain), atol=1e-4, rtol=0)


def test_loss_memory_is_bounded_by_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of [tokens, vocab] exists: the largest one with a vocabulary axis has the chunk's rows."""
    monkeypatch.setattr("verl.models.token_log_probs.CHUNK_ELEMENTS", 64 * 4)
    lm = CausalLM(tiny_model("llama"))
    rows: list[int] = []
    original = lm.logits
    lm.logits = lambda hidden: rows.append(len(hidden)) or original(hidden)  # type: ignore[method-assign,func-returns-value]
    engine = TrainingEngine(PolicyNetwork(lm), TrainedConfig(), CPU, "actor")
    engine.update(sampled_batch([2, 2], [30, 11]), grpo_loss(), lr=0.0)
    assert max(rows) == 4


def test_update_without_response_tokens_changes_nothing() -> None:
    engine = training_engine()
    before = weights(engine)
    metrics = engine.update(sampled_batch([3, 2], [0, 0]), grpo_loss(), lr=1.0).result()
    assert torch.equal(weights(engine), before) and metrics["actor/grad_norm"] == 0
    assert torch.isfinite(weights(engine)).all()


def test_non_finite_gradient_is_skipped_and_counted() -> None:
    engine = training_engine()
    before = weights(engine)

    def loss(outputs, columns) -> Loss:
        return Loss(outputs["log_probs"].sum() * float("nan"), torch.ones(()), {})

    metrics = engine.update(sampled_batch([3, 2], [2, 2]), loss, lr=1.0).result()
    assert metrics["actor/skipped_updates/sum"] == 1 and torch.equal(weights(engine), before)
    assert not engine.has_unsynced_update
    good = engine.update(sampled_batch([3, 2], [2, 2]), grpo_loss(), lr=1e-3).result()
    assert good["actor/skipped_updates/sum"] == 0 and not torch.equal(weights(engine), before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_skipped_though_its_gradient_is(bad: float) -> None:
    engine = training_engine()
    before = weights(engine)

    def loss(outputs, columns) -> Loss:
        return Loss(outputs["log_probs"].sum() + bad, torch.ones(()), {})

    metrics = engine.update(sampled_batch([3, 2], [2, 2]), loss, lr=1.0).result()
    assert math.isfinite(metrics["actor/grad_norm"]) and metrics["actor/grad_norm"] > 0
    assert metrics["actor/skipped_updates/sum"] == 1 and torch.equal(weights(engine), before)


def test_updates_skipped_in_a_row_are_counted_until_one_is_applied() -> None:
    engine, batch = training_engine(), sampled_batch([3, 2], [2, 2])

    def bad(outputs, columns) -> Loss:
        return Loss(outputs["log_probs"].sum() * float("nan"), torch.ones(()), {})

    losses = [bad, bad, bad, grpo_loss(), bad]
    counts = [engine.update(batch, loss, lr=0.0).result()["actor/skipped_in_a_row/max"] for loss in losses]
    assert counts == [1, 2, 3, 0, 1]


def test_gradient_clipping_scales_to_the_limit() -> None:
    batch = sampled_batch(PROMPTS, RESPONSES)
    free, clipped = training_engine(), training_engine(max_grad_norm=1e-3)
    norms = [e.update(batch, grpo_loss(), lr=0.0).result()["actor/grad_norm"] for e in (free, clipped)]
    assert norms[0] == pytest.approx(norms[1]) and norms[0] > 1e-3


def test_bfloat16_module_learns_through_float32_masters() -> None:
    """A step far below bfloat16's resolution is lost in the weights but kept in the masters."""
    module = tiny_model("llama").to(torch.bfloat16)
    engine = TrainingEngine(PolicyNetwork(CausalLM(module)), TrainedConfig(), CPU, "actor")
    before = {name: m.detach().clone() for name, m in engine.masters.masters.items()}
    assert all(m.dtype == torch.float32 for m in before.values())
    for _ in range(3):
        engine.update(sampled_batch(PROMPTS, RESPONSES), grpo_loss(), lr=1e-5)
    moved = [(engine.masters.masters[n] - before[n]).abs().max().item() for n in before]
    assert max(moved) > 1e-5
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, engine.masters.masters[name].bfloat16()) and parameter.grad is None


def test_values_start_at_zero_and_learn() -> None:
    kind = ALGORITHMS.load("ppo")
    algorithm = kind(kind.Config(name="ppo"))
    engine = TrainingEngine(ValueNetwork(copy.deepcopy(tiny_model("llama"))), TrainedConfig(), CPU, "critic")
    batch = sampled_batch(PROMPTS, RESPONSES)
    assert torch.equal(engine.infer(batch, "values"), torch.zeros(sum(RESPONSES)))
    batch.put("values", torch.zeros(sum(RESPONSES)))
    losses = [
        engine.update(batch, lambda o, c: algorithm.critic_loss(o["values"], c), lr=1e-3).result()["critic/value_loss"]
        for _ in range(5)
    ]
    assert losses[-1] < losses[0]


def test_infer_keeps_the_batch_order() -> None:
    batch: Batch = sampled_batch(PROMPTS, RESPONSES)
    network = PolicyNetwork(CausalLM(tiny_model("llama")))
    whole = Engine(network, EngineConfig(max_tokens_per_micro_batch=1000), CPU).infer(batch, "log_probs")
    cut = Engine(network, EngineConfig(max_tokens_per_micro_batch=9), CPU).infer(batch, "log_probs")
    torch.testing.assert_close(whole, cut, atol=1e-5, rtol=0)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_the_policy_that_learns_is_the_one_that_samples(gradient_checkpointing: bool) -> None:
    """Dropout and noise of training mode would make the ratio of a first update another number than 1."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "seed_oss", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, residual_dropout=0.5, attention_dropout=0.5,
    )  # fmt: skip
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    settings = TrainedConfig(gradient_checkpointing=gradient_checkpointing)
    engine = TrainingEngine(PolicyNetwork(CausalLM(module)), settings, CPU, "actor")
    batch = sampled_batch(PROMPTS, RESPONSES)
    for _ in range(2):
        batch.put("old_log_probs", engine.infer(batch, "log_probs"))
        metrics = engine.update(batch, grpo_loss(), lr=1e-2).result()
        assert metrics["actor/ratio/max"] == pytest.approx(1, abs=1e-5)
        assert metrics["actor/ratio/min"] == pytest.approx(1, abs=1e-5)


def test_layers_are_run_again_in_the_backward_pass_only_when_asked() -> None:
    """Gradient checkpointing happens although the module's parts aren't in training mode."""

    def forward_passes(gradient_checkpointing: bool) -> int:
        engine, calls = training_engine(gradient_checkpointing=gradient_checkpointing), []
        engine.network.module.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        engine.update(sampled_batch(PROMPTS, RESPONSES), grpo_loss(), lr=1e-3)
        return len(calls)

    assert (forward_passes(False), forward_passes(True)) == (1, 2)


def test_gradient_checkpointing_of_a_model_that_cant() -> None:
    config = AutoConfig.for_model("ctrl", vocab_size=64, n_embd=32, n_layer=2, n_head=2, dff=48)
    network = PolicyNetwork(CausalLM(AutoModelForCausalLM.from_config(config, dtype=torch.float32)))
    with pytest.raises(ConfigError, match=r"actor\.gradient_checkpointing"):
        TrainingEngine(network, TrainedConfig(gradient_checkpointing=True), CPU, "actor")


def test_the_decays_of_the_moments_are_the_sections() -> None:
    optim = OptimConfig(betas=[0.5, 0.25], max_grad_norm=None)
    engine = TrainingEngine(PolicyNetwork(CausalLM(tiny_model("llama"))), TrainedConfig(optim=optim), CPU, "actor")
    engine.update(sampled_batch(PROMPTS, RESPONSES), grpo_loss(), lr=1e-3)
    gradient = {p: state["exp_avg"] / 0.5 for p, state in engine.optimizer.state.items()}
    for parameter, state in engine.optimizer.state.items():
        torch.testing.assert_close(state["exp_avg_sq"], 0.75 * gradient[parameter] ** 2)
    assert any(bool(g.abs().max() > 0) for g in gradient.values())
