from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.batches import sampled_batch
from tests.tiny import tiny_model
from verl.algorithms import ALGORITHMS
from verl.batch import Batch
from verl.engines.base import Engine, TrainingEngine
from verl.engines.config import EngineConfig, TrainedConfig
from verl.models.causal_lm import CausalLM
from verl.models.networks import PolicyNetwork, ValueNetwork
from verl.observe.metrics import MetricSums
from verl.workers.reference import Reference
from verl.workers.trained import Actor, Critic

CPU = torch.device("cpu")
PROMPTS, RESPONSES = [2, 3, 4, 2, 5], [3, 4, 1, 2, 6]


def actor(**config: Any) -> Actor:
    kind = ALGORITHMS.load("grpo")
    trained = TrainedConfig.parse({"optim": {"lr": 0.01}, **config})
    engine = TrainingEngine(PolicyNetwork(CausalLM(tiny_model("llama"))), trained, CPU, "actor")
    return Actor(engine, trained, kind(kind.Config(name="grpo")), seed=4)


def critic(**config: Any) -> Critic:
    kind = ALGORITHMS.load("ppo")
    trained = TrainedConfig.parse({"optim": {"lr": 0.01}, **config})
    engine = TrainingEngine(ValueNetwork(tiny_model("llama")), trained, CPU, "critic")
    return Critic(engine, trained, kind(kind.Config(name="ppo")), seed=4)


def parts_of(role: Actor, step: int = 1, pairs: list[int] | None = None) -> list[list[int]]:
    """Rows of each mini-batch of an update."""
    seen: list[list[int]] = []
    batch = sampled_batch(PROMPTS, RESPONSES)
    if pairs is not None:
        batch.put("pair_id", torch.tensor(pairs))
    role.engine.update = lambda part, *_, **__: seen.append(part["row_id"].tolist()) or MetricSums()  # type: ignore
    role.update(batch, step=step, total_steps=3)
    return seen


@pytest.mark.parametrize(
    ("epochs", "parts", "sizes"), [(1, 1, [5]), (1, 2, [3, 2]), (2, 3, [2, 2, 1] * 2), (1, 9, [1] * 5)]
)
def test_every_epoch_visits_each_row_once(epochs: int, parts: int, sizes: list[int]) -> None:
    seen = parts_of(actor(epochs_per_step=epochs, mini_batches_per_epoch=parts))
    assert [len(rows) for rows in seen] == sizes
    per_epoch = len(sizes) // epochs
    for start in range(0, len(seen), per_epoch):
        assert sorted(row for part in seen[start : start + per_epoch] for row in part) == [0, 1, 2, 3, 4]


def test_mini_batches_never_part_a_pair() -> None:
    for parts in (2, 9):
        seen = parts_of(actor(mini_batches_per_epoch=parts, epochs_per_step=4), pairs=[5, 6, 5, 6, 7])
        assert len(seen) == 4 * min(parts, 3)
        assert all((0 in rows) == (2 in rows) and (1 in rows) == (3 in rows) for rows in seen)


def test_mini_batches_follow_from_seed_step_and_epoch() -> None:
    config = {"epochs_per_step": 2, "mini_batches_per_epoch": 2}
    first = parts_of(actor(**config))
    assert first == parts_of(actor(**config)) and first != parts_of(actor(**config), step=2)
    assert first[:2] != first[2:]


def test_the_learning_rate_is_that_of_the_step() -> None:
    role = actor(optim={"lr": 0.4, "schedule": "linear", "warmup_steps": 2})
    batch = sampled_batch(PROMPTS, RESPONSES)
    rates = [role.update(batch, step=step, total_steps=6).result()["actor/lr"] for step in range(1, 7)]
    assert rates == pytest.approx([0.2, 0.4, 0.4, 0.3, 0.2, 0.1])


def test_each_role_writes_its_column() -> None:
    batch = sampled_batch(PROMPTS, RESPONSES)
    reference = Reference(Engine(PolicyNetwork(CausalLM(tiny_model("llama"))), EngineConfig(), CPU))
    value = critic()
    with torch.no_grad():
        value.engine.network.module.value_head.bias.fill_(1.5)
    for role in (actor(), reference, value):
        role.infer(batch)
    torch.testing.assert_close(batch["old_log_probs"], batch["ref_log_probs"], atol=1e-6, rtol=0)
    assert batch["values"].tolist() == pytest.approx([1.5] * sum(RESPONSES))


def learnt(role: Any, batch: Batch) -> torch.Tensor:
    before = torch.cat([p.detach().flatten().clone() for p in role.engine.network.module.parameters()])
    role.update(batch, step=1, total_steps=1)
    return torch.cat([p.detach().flatten() for p in role.engine.network.module.parameters()]) - before


@pytest.mark.parametrize("make", [actor, critic])
def test_an_update_moves_the_role_towards_its_aim(make: Any) -> None:
    batch = sampled_batch(PROMPTS, RESPONSES)
    role = make(optim={"lr": 0.003})
    role.infer(batch)
    if role.name == "critic":
        batch.put("returns", torch.full((sum(RESPONSES),), 2.0))
        assert bool(learnt(role, batch).any())
        role.infer(batch)
        assert float(batch["values"].mean()) > 0
    else:
        before = batch["old_log_probs"].clone()
        batch.put("advantages", torch.ones(sum(RESPONSES)))
        assert bool(learnt(role, batch).any())
        role.infer(batch)
        assert float((batch["old_log_probs"] - before).mean()) > 0


def test_an_algorithm_without_a_critic_says_so() -> None:
    from verl.common.errors import ConfigError

    with pytest.raises(ConfigError, match="'grpo' has no critic"):
        actor().algorithm.critic_loss(torch.zeros(1, 1), {})
