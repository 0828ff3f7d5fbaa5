from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny_folder, tiny_model, word_tokenizer
from tests.trainer.runs import sections
from verl.common.errors import ConfigError, VerlError
from verl.trainer import inputs
from verl.trainer.assembly import Parts, assemble
from verl.trainer.base_sections import GIVEN
from verl.trainer.inputs import Given, pick_device, reward_keys, sections_of
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.sections import OnPolicyRun


def parts_of(folder: Path, **changes: Any) -> Parts:
    parts = assemble(OnPolicyRun.parse(sections(folder, **changes)), Given())
    parts.rewards.close()
    return parts


def len_of(response: str) -> int:
    return len(response)


def names(roles: list[Any]) -> list[str]:
    return [role.name for role in roles]


@pytest.mark.parametrize(
    ("changes", "passes", "trained"),
    [
        ({"algorithm": "grpo"}, [], ["actor"]),
        ({"algorithm": {"name": "grpo", "kl_coef": 0.1}}, ["reference"], ["actor"]),
        ({"algorithm": "grpo", "actor__mini_batches_per_epoch": 2}, ["actor"], ["actor"]),
        ({"algorithm": "grpo", "actor__epochs_per_step": 2}, ["actor"], ["actor"]),
        ({"algorithm": {"name": "ppo", "kl_coef": 0.0}}, ["critic"], ["critic", "actor"]),
        ({"algorithm": {"name": "ppo", "kl_coef": 0.1}}, ["actor", "reference", "critic"], ["critic", "actor"]),
        ({"algorithm": {"name": "ppo", "kl_coef": 0.1, "kl_in": "loss"}}, ["reference", "critic"], ["critic", "actor"]),
    ],
)
def test_passes_and_roles_follow_from_what_the_algorithm_declares(
    tmp_path: Path, changes: dict[str, Any], passes: list[str], trained: list[str]
) -> None:
    parts = parts_of(tmp_path, **changes)
    assert names(parts.passes) == passes and names(parts.trained) == trained
    assert (parts.roles.critic is not None) is ("critic" in trained)


def test_roles_share_no_weights_but_the_rollout_and_the_actor_do(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, algorithm={"name": "ppo", "kl_coef": 0.1})
    pointers = {p.data_ptr() for p in parts.roles.module.parameters()}
    reference = next(role for role in parts.passes if role.name == "reference").engine.network.module
    assert parts.roles.critic is not None
    for module in (reference, parts.roles.critic.engine.network.module):
        assert not pointers & {p.data_ptr() for p in module.parameters()}
    assert not any(p.requires_grad for p in reference.parameters())
    assert pointers == {p.data_ptr() for p in parts.roles.actor.engine.network.module.parameters()}


def test_objects_stand_in_for_names() -> None:
    model, tokenizer, rows = tiny_model("llama"), word_tokenizer(), [{"prompt": "w9", "ground_truth": "1"}]
    run, given = sections_of(
        model=model, data={"train": rows, "max_prompt_tokens": 9}, reward=len, tokenizer=tokenizer, val=rows,
        algorithm="grpo",
    )  # fmt: skip
    assert (given.model, given.tokenizer, given.train, given.val, given.reward) == (model, tokenizer, rows, rows, len)
    assert run.model.path == run.model.tokenizer == run.data.train == run.data.val == GIVEN
    assert run.data.max_prompt_tokens == 9 and run.rollout.name == "native"


def test_names_stay_names(tmp_path: Path) -> None:
    run, given = sections_of(
        model=tmp_path, data=["a.jsonl", "b.jsonl"], reward="exact", tokenizer=tmp_path, val=None, algorithm="ppo",
        trainer={"seed": 3},
    )  # fmt: skip
    assert given == Given()
    assert run.model.path == run.model.tokenizer == str(tmp_path)
    assert run.data.train == ["a.jsonl", "b.jsonl"] and run.reward.name == "exact" and run.trainer.seed == 3


@pytest.mark.parametrize(
    ("reward", "keys"), [("exact", {"name": "exact"}), ("a.py:f", {"function": "a.py:f"}), (len, {"function": len})]
)
def test_reward_keys(reward: Any, keys: dict[str, Any]) -> None:
    assert reward_keys(reward) == keys


def test_devices() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("gpu", "", "mps", "cuda:abc", "meta"):
        with pytest.raises(ConfigError, match=r"trainer\.device"):
            pick_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda() -> None:
    with pytest.raises(ConfigError, match=r"no CUDA device. Set trainer\.device"):
        pick_device("cuda:0")


def test_a_cuda_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == torch.device("cuda:1") and pick_device("cuda").index is None
    with pytest.raises(ConfigError, match=r"trainer\.device='cuda:2', but there are 2 CUDA devices"):
        pick_device("cuda:2")


@pytest.mark.parametrize(("tokens", "fits"), [(28, True), (29, False)])
def test_prompt_and_response_must_fit_the_positions(tmp_path: Path, tokens: int, fits: bool) -> None:
    """The model has 32 positions and the longest prompt 4 tokens, whatever the limit on prompts says."""
    changes = {"rollout__max_response_tokens": tokens, "data__max_prompt_tokens": 100}
    if fits:
        parts_of(tmp_path, **changes)
        return
    with pytest.raises(ConfigError) as caught:
        parts_of(tmp_path, **changes)
    for part in ("4 tokens", "rollout.max_response_tokens=29", "33 positions", "has 32", "data.max_prompt_tokens (now"):
        assert part in str(caught.value)


def test_validation_prompts_must_fit_too(tmp_path: Path) -> None:
    (tmp_path / "val.jsonl").write_text('{"prompt": "123456789", "ground_truth": "1"}\n')
    changes = {"rollout__max_response_tokens": 28, "data__val": str(tmp_path / "val.jsonl")}
    with pytest.raises(ConfigError, match=r"longest prompt of data\.val has 9 tokens"):
        parts_of(tmp_path, **changes, data__max_prompt_tokens=20)


def test_workers_end_when_the_model_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    plain = inputs.reward_runner
    monkeypatch.setattr(inputs, "reward_runner", lambda *a: made.append(plain(*a)) or made[0])  # type: ignore
    folder = tiny_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(VerlError, match=r"model\.path"):
        parts_of(tmp_path, model={"path": str(folder)}, data__chat="never", reward={"name": "exact", "workers": 1})
    with pytest.raises(Exception, match=r"closed|shut"):
        made[0]._pool.submit(b"")


def test_the_users_model_is_given_back(tmp_path: Path) -> None:
    model, ids = tiny_model("llama"), torch.tensor([[1, 5, 9]])
    before = model(ids).logits
    trainer = PPOTrainer(
        model, [{"prompt": "w9", "ground_truth": "1"}], {"function": len_of, "workers": 0}, tokenizer=word_tokenizer(),
        rollout={"max_response_tokens": 3}, actor={"optim": {"lr": 0.0}}, track={"trackers": []},
        trainer={"output_dir": str(tmp_path / "run"), "prompts_per_step": 1, "group_size": 2, "device": "cpu"},
    )  # fmt: skip
    trainer.step()
    with pytest.raises(VerlError, match=r"close\(\) the trainer first"):
        model(ids)
    trainer.close()
    torch.testing.assert_close(model(ids).logits, before)
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape[1] <= 5
    trainer.step()  # and taken again
    trainer.close()
    assert trainer.metrics["actor/rollout_log_prob_diff/max"] < 1e-5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"actor__parallel": {"tensor_parallel_size": 2}},
            r"actor\.parallel: tensor_parallel_size=2 doesn't divide the model's num_key_value_heads=1",
        ),
        (
            {"algorithm": {"name": "ppo"}, "critic__parallel": {"pipeline_parallel_size": 4}},
            r"critic\.parallel: pipeline_parallel_size=4 is more than the model's 2 layers",
        ),
        (
            {"actor__parallel": {"sequence_parallel_size": 4}},
            r"actor\.parallel: sequence_parallel_size=4 doesn't divide the 2 attention heads",
        ),
        (
            {
                "model__scratch__num_key_value_heads": 2,
                "actor__parallel": {"sequence_parallel_size": 2, "tensor_parallel_size": 2},
            },
            r"actor\.parallel: sequence_parallel_size=2 doesn't divide the 1 attention heads that a rank has",
        ),
        (
            {"model__lora": {"rank": 2}, "actor__parallel": {"pipeline_parallel_size": 2}},
            r"actor\.parallel\.pipeline_parallel_size=2 can't be with an adapter",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_before_a_worker_starts(
    tmp_path: Path, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl.controller.executors.processes.Processes.start", lambda *_: 1 / 0)
    with pytest.raises(ConfigError, match=words):
        parts_of(tmp_path, placement__devices=4, **changes)
