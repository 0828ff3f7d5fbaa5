"""What an engine does with a module that has an adapter: trains it alone, saves it alone, hands out what it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.batches import sampled_batch
from tests.ranks import run_ranks
from tests.rollout.engines import build, prompt, request
from tests.tiny import tiny_model
from verl.algorithms import ALGORITHMS
from verl.common.errors import ConfigError, StaleWeights
from verl.engines.base import TrainingEngine
from verl.engines.config import OptimConfig, TrainedConfig
from verl.engines.mesh import Mesh, ParallelConfig
from verl.hybrid_engine.colocated import SharedWeights
from verl.models.causal_lm import CausalLM
from verl.models.lora import LoraConfig, add_adapter, merge_adapter, without_adapter
from verl.models.networks import PolicyNetwork, ScoreNetwork, ValueNetwork

pytest.importorskip("peft")
CPU = torch.device("cpu")
PROMPTS, RESPONSES = [3, 5, 1, 7], [4, 1, 6, 0]
LR = 1e-2


def engine_of(
    kind: str = "actor", dtype: torch.dtype = torch.float32, mesh: Mesh | None = None, **keys: Any
) -> TrainingEngine:
    module = tiny_model("llama").to(dtype)
    add_adapter(module, LoraConfig(rank=2, alpha=4.0), base="nowhere", seed=0)
    network: Any = PolicyNetwork(CausalLM(module)) if kind == "actor" else None
    if network is None:
        network = ValueNetwork(module) if kind == "critic" else ScoreNetwork(CausalLM(module))
    config = TrainedConfig(optim=OptimConfig(lr=LR, weight_decay=0.1), **keys)
    return TrainingEngine(network, config, CPU, kind, mesh)


def learn(engine: TrainingEngine, rows: list[int] | None = None, steps: int = 2) -> list[dict[str, float]]:
    algorithm = ALGORITHMS.load("ppo")(ALGORITHMS.load("ppo").Config(name="ppo"))
    batch = sampled_batch(PROMPTS, RESPONSES)
    batch = batch if rows is None else batch.select(rows)

    def loss(outputs: Any, columns: Any) -> Any:
        if "values" in outputs:
            return algorithm.critic_loss(outputs["values"], columns)
        return algorithm.actor_loss(outputs["log_probs"], outputs["entropy"], columns)

    return [engine.update(batch, loss, lr=LR).result() for _ in range(steps)]


def weights(engine: TrainingEngine) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in engine.network.module.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_adapter_learns_and_nothing_else_moves(dtype: torch.dtype, checkpointing: bool) -> None:
    engine = engine_of(dtype=dtype, gradient_checkpointing=checkpointing)
    before = weights(engine)
    learn(engine)
    moved = {name for name, p in weights(engine).items() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if ".lora_" in name}
    assert moved == engine.masters.masters.keys()
    assert all(m.dtype == torch.float32 for m in engine.masters.masters.values())


def test_a_critic_learns_its_head_too() -> None:
    engine = engine_of("critic")
    before = weights(engine)
    learn(engine, steps=3)  # the head starts at 0, and hands the adapter no gradient before it has moved
    moved = {name for name, p in weights(engine).items() if not torch.equal(p, before[name])}
    assert {"value_head.weight", "value_head.bias"} <= moved
    assert moved - {"value_head.weight", "value_head.bias"} == {name for name in before if ".lora_" in name}


@pytest.mark.parametrize("kind", ["actor", "critic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_holds_the_adapter_alone_and_goes_on(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    straight, first, second = engine_of(kind, dtype), engine_of(kind, dtype), engine_of(kind, dtype)
    learn(straight, steps=4)
    learn(first)
    taken = first.snapshot()
    learn(first)  # what was taken is of the moment before
    taken.write(tmp_path)
    second.restore(tmp_path)
    learn(second)
    assert all(torch.equal(p, weights(straight)[name]) for name, p in weights(second).items())
    stored = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    base = sum(p.nbytes for name, p in first.network.module.named_parameters() if ".lora_" not in name)
    assert stored < base / 2
    assert first.checkpoint_bytes() < base


def test_the_saved_adapter_merged_is_what_was_trained(tmp_path: Path) -> None:
    """H13: the model that ships is the one that learnt."""
    engine = engine_of()
    learn(engine)
    engine.snapshot().write(tmp_path)
    batch = sampled_batch(PROMPTS, RESPONSES)
    ours = engine.infer(batch, "log_probs")
    merged = TrainingEngine(
        PolicyNetwork(CausalLM(merge_adapter(tiny_model("llama"), tmp_path / "model"))), TrainedConfig(), CPU, "actor"
    )
    base = TrainingEngine(PolicyNetwork(CausalLM(tiny_model("llama"))), TrainedConfig(), CPU, "actor")
    torch.testing.assert_close(merged.infer(batch, "log_probs"), ours, atol=1e-4, rtol=0)
    assert float((base.infer(batch, "log_probs") - ours).abs().max()) > 0.1
    with without_adapter(engine.network.module):
        assert torch.equal(engine.infer(batch, "log_probs"), base.infer(batch, "log_probs"))


def test_a_reward_model_s_adapter_has_its_head(tmp_path: Path) -> None:
    import warnings

    import peft
    from transformers import AutoModelForSequenceClassification

    engine = engine_of("reward_model")
    module: Any = engine.network.module
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.arange(parameter.numel()).view(parameter.shape).sin())
                assert ".lora_" in name or name == "score.weight"
    engine.snapshot().write(tmp_path)
    engine.save_base(tmp_path / "base")
    ids = torch.arange(7, 15)[None]
    ours = engine.network.lm.backbone
    ours.set_attn_implementation("eager")
    expected = module.score(ours(input_ids=ids).last_hidden_state)[0, -1].detach()

    def base() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1, pad_token_id=0)

    torch.testing.assert_close(merge_adapter(base(), tmp_path / "model")(ids).logits[0].detach(), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        theirs = peft.PeftModel.from_pretrained(base(), tmp_path / "model")
    torch.testing.assert_close(theirs(ids).logits[0].detach(), expected)


def test_the_base_is_written_as_it_was(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    engine = engine_of()
    learn(engine)
    engine.save_base(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    base = tiny_model("llama").state_dict()
    assert saved.state_dict().keys() == base.keys()
    assert all(torch.equal(tensor, base[name]) for name, tensor in saved.state_dict().items())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_rollout_samples_from_base_and_adapter_at_every_step(family: str) -> None:
    """H13: before a step the base's log-probs, after it the trainer's, which are other ones."""
    module = tiny_model(family)
    add_adapter(module, LoraConfig(rank=2, alpha=4.0), base="nowhere", seed=0)
    engine = TrainingEngine(PolicyNetwork(CausalLM(module)), TrainedConfig(), CPU, "actor")
    rollout = build(module=module)
    shared = SharedWeights(engine, rollout, module)
    batch = sampled_batch([5], [8])
    before = engine.infer(batch, "log_probs")
    for is_trained in (False, True):
        if is_trained:
            learn(engine, steps=3)
            with pytest.raises(StaleWeights):
                shared.check()
            with pytest.raises(StaleWeights):
                rollout.generate([request(prompt(5))])
            shared.sync()
        (response,) = rollout.generate([request(prompt(5))])
        batch.put("prompt_ids", torch.tensor(prompt(5)), [5])
        batch.put("response_ids", torch.tensor(response.response_ids), [len(response.response_ids)])
        ours = engine.infer(batch, "log_probs")
        torch.testing.assert_close(torch.tensor(response.log_probs), ours, atol=1e-5, rtol=0)
        with without_adapter(module):
            base = engine.infer(batch, "log_probs")
        assert (float((base - ours).abs().max()) > 1e-2) is is_trained
    assert before.shape == (8,)


def test_cuts_through_an_adapter_are_refused_by_key() -> None:
    def on_rank(rank: int) -> list[str]:
        said = []
        for key in ("tensor_parallel_size", "pipeline_parallel_size"):
            mesh = Mesh.build(ParallelConfig(**{key: 2}), "cpu")
            with pytest.raises(ConfigError) as error:
                engine_of(mesh=mesh)
            said.append(str(error.value))
        return said

    for tensor, pipeline in run_ranks(2, on_rank):
        assert "actor.parallel.tensor_parallel_size=2" in tensor
        assert "actor.parallel.pipeline_parallel_size=2" in pipeline


ON_TWO_RANKS: list[dict[str, Any]] = [
    {},
    {"sizes": {"sequence_parallel_size": 2}},
    {"offload_parameters": True},
    {"reshard_after_forward": False, "kind": "critic"},
]


def test_two_ranks_train_the_adapter_of_one(tmp_path: Path) -> None:
    singles, expected = {}, {}
    for kind in ("actor", "critic"):
        singles[kind] = engine_of(kind)
        expected[kind] = learn(singles[kind])
        singles[kind].snapshot().write(tmp_path / kind)

    def on_rank(rank: int, folder: Path) -> Any:
        found = []
        for case, settings in enumerate(ON_TWO_RANKS):
            keys = {"kind": "actor", "sizes": {}, **settings}
            mesh = Mesh.build(ParallelConfig(**keys.pop("sizes")), "cpu")
            engine = engine_of(mesh=mesh, **keys)
            metrics = learn(engine, [[0, 3], [1, 2]][mesh.dp_rank] if mesh.dp_size > 1 else None)
            engine.snapshot().write(folder / str(case))
            engine.restore(folder / keys["kind"])
            found.append((metrics, {name: p.clone() for name, p in engine.named_full_tensors()}))
        return found

    for found in run_ranks(2, on_rank, tmp_path):
        for case, (metrics, whole) in enumerate(found):
            kind = ON_TWO_RANKS[case].get("kind", "actor")
            for ours, one in zip(metrics, expected[kind], strict=True):
                assert ours[f"{kind}/grad_norm"] == pytest.approx(one[f"{kind}/grad_norm"], rel=1e-4)
            assert all(torch.equal(tensor, weights(singles[kind])[name]) for name, tensor in whole.items())
            other = engine_of(kind)
            other.restore(tmp_path / str(case))
            for name, tensor in weights(other).items():
                torch.testing.assert_close(tensor, weights(singles[kind])[name], atol=2e-5, rtol=1e-4)
