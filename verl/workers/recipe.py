"""What every process makes its part of a run from: the sections that concern models, and how roles are built of them.

The same builders serve a run in one process and the workers of one over many. Knows nothing of data, rewards or the
loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.algorithms import ALGORITHMS
from verl.algorithms.base import Algorithm, AlgorithmConfig
from verl.common.errors import ConfigError
from verl.engines.base import Engine, TrainingEngine
from verl.engines.config import EngineConfig, TrainedConfig
from verl.engines.mesh import Mesh
from verl.models.causal_lm import CausalLM
from verl.models.loading import ModelConfig, compute_dtype, eos_token_ids, load_model
from verl.models.lora import add_adapter, has_adapter
from verl.models.networks import PolicyNetwork, ScoreNetwork, ValueNetwork
from verl.rollout import ROLLOUT_ENGINES
from verl.rollout.base import RolloutEngine
from verl.rollout.config import RolloutConfig
from verl.workers.reference import Reference
from verl.workers.trained import Actor, Critic, RewardModelRole, TrainedRole

_LEARNERS: dict[str, type[TrainedRole]] = {kind.name: kind for kind in (Actor, RewardModelRole)}


@dataclass(frozen=True)
class Recipe:
    """Sections of a run, validated, and its tokenizer. Small, and travels to every worker.

    rollout  None for a run that samples nothing
    base     where the model that an adapter is added to can be found again
    """

    model: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    algorithm: AlgorithmConfig
    actor: TrainedConfig
    reference: EngineConfig
    seed: int
    rollout: RolloutConfig | None = None
    critic: TrainedConfig = field(default_factory=TrainedConfig)
    base: str = ""

    @property
    def temperature(self) -> float:
        """Of the distribution whose log-probs count: the sampler's; 1 where nothing is sampled."""
        return 1.0 if self.rollout is None else self.rollout.temperature

    def load(self, device: torch.device) -> PreTrainedModel:
        """The policy's starting point. One made from scratch draws from torch's generator: seed it before."""
        module = load_model(self.model, self.tokenizer, device, compute_dtype(self.model.amp_dtype, device))
        return self.adapted(module)

    def adapted(self, module: PreTrainedModel) -> PreTrainedModel:
        """``module`` with an adapter in it, where the model section asks for one; else it must have none."""
        if self.model.lora.is_on:
            add_adapter(module, self.model.lora, base=self.base, seed=self.seed)
        elif has_adapter(module):
            raise ConfigError("the model has an adapter in it: merge it, and set model.lora.rank to train another one")
        return module

    def make_algorithm(self, dtype: torch.dtype) -> Algorithm[Any]:
        """The algorithm, for models that compute in ``dtype``."""
        algorithm: Algorithm[Any] = ALGORITHMS.load(self.algorithm.name)(self.algorithm)
        algorithm.rollout_rounds_apart = dtype != torch.float32
        algorithm.max_response_tokens = None if self.rollout is None else self.rollout.max_response_tokens
        return algorithm

    def make_actor(self, lm: CausalLM, algorithm: Algorithm[Any], device: torch.device, mesh: Mesh) -> TrainedRole:
        """What learns from the starting point on: the policy or, as the algorithm declares, a reward model."""
        kind = learner(algorithm)
        network = ScoreNetwork(lm) if kind is RewardModelRole else PolicyNetwork(lm, self.temperature)
        engine = TrainingEngine(network, self.actor, device, kind.name, mesh)
        return kind(engine, self.actor, algorithm, self.seed)

    def make_critic(
        self, module: PreTrainedModel, algorithm: Algorithm[Any], device: torch.device, mesh: Mesh
    ) -> Critic:
        """The value function, on a backbone of its own."""
        engine = TrainingEngine(ValueNetwork(module), self.critic, device, "critic", mesh)
        return Critic(engine, self.critic, algorithm, self.seed)

    def make_reference(self, module: PreTrainedModel, device: torch.device, mesh: Mesh) -> Reference:
        """The frozen starting policy."""
        network = PolicyNetwork(CausalLM(module.requires_grad_(False)), self.temperature)
        return Reference(Engine(network, self.reference, device, "reference", mesh))

    def make_rollout(self, lm: CausalLM) -> RolloutEngine:
        """The rollout engine over ``lm``."""
        assert self.rollout is not None, "a run that samples has a rollout section"
        build: Callable[..., RolloutEngine] = ROLLOUT_ENGINES.load(self.rollout.name)
        return build(lm, self.tokenizer, self.rollout, eos_token_ids(lm.module, self.tokenizer))


def learner(algorithm: Algorithm[Any]) -> type[TrainedRole]:
    """The role that ``actor`` configures: of those that the algorithm trains the one that starts from ``model``."""
    return next(_LEARNERS[name] for name in algorithm.trains if name in _LEARNERS)
