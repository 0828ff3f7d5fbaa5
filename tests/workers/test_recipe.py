from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import torch

from tests.workers.recipes import batch_of, recipe_of, same
from verl.common.seeding import seed_everything
from verl.engines.mesh import Mesh
from verl.models.causal_lm import CausalLM
from verl.rollout.base import Request
from verl.workers.recipe import Recipe

CPU = torch.device("cpu")
PPO = {"algorithm": {"name": "ppo", "kl_coef": 0.1}}


def weights(recipe: Recipe) -> dict[str, torch.Tensor]:
    seed_everything(recipe.seed)
    return dict(recipe.load(CPU).named_parameters())


def test_a_recipe_that_has_travelled_makes_the_same_model(tmp_path: Path) -> None:
    """Every worker makes its own from the seed alone, and all must begin with the same weights."""
    recipe = recipe_of(tmp_path)
    there = pickle.loads(pickle.dumps(recipe))
    assert same(weights(recipe), weights(there))
    assert not same(weights(recipe), weights(recipe_of(tmp_path, trainer__seed=1)))


def test_roles_of_a_recipe(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, **PPO, critic__optim__lr=0.5, actor__optim__lr=0.25, rollout__temperature=0.7)
    algorithm, batch = recipe.make_algorithm(torch.float32), batch_of([3, 1, 4])
    lm = CausalLM(recipe.load(CPU))
    actor = recipe.make_actor(lm, algorithm, CPU, Mesh.single())
    critic = recipe.make_critic(recipe.load(CPU), algorithm, CPU, Mesh.single())
    reference = recipe.make_reference(recipe.load(CPU), CPU, Mesh.single())
    assert (actor.config.optim.lr, critic.config.optim.lr) == (0.25, 0.5)
    assert actor.engine.network.temperature == reference.engine.network.temperature == 0.7
    assert not any(p.requires_grad for p in reference.engine.network.module.parameters())
    for role in (actor, critic, reference):
        role.infer(batch)
        assert batch[role.writes].shape == (8,)


def test_a_rollout_samples_from_the_module_that_it_is_given(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    lm = CausalLM(recipe.load(CPU))
    rollout = recipe.make_rollout(lm)
    request = Request(prompt_ids=[1, 2], seed=3, sampling=recipe.rollout.sampling(temperature=0.0))
    before = rollout.generate([request])[0].log_probs
    with torch.no_grad():
        lm.head.weight.mul_(0.0)
    rollout.weights_changed(1)
    after = rollout.generate([request])[0].log_probs
    assert after != before and abs(after[0] - torch.tensor(1 / 14).log().item()) < 1e-5


def test_an_algorithm_knows_the_longest_response_of_the_rollout(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, rollout__max_response_tokens=7)
    assert recipe.make_algorithm(torch.float32).max_response_tokens == 7
    assert replace(recipe, rollout=None).make_algorithm(torch.float32).max_response_tokens is None


def test_rounding_apart_follows_from_the_type(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    assert not recipe.make_algorithm(torch.float32).rollout_rounds_apart
    assert recipe.make_algorithm(torch.bfloat16).rollout_rounds_apart
