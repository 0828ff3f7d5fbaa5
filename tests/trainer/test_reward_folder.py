from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_folder, tiny_model, word_tokenizer
from verl.common.errors import DataError, UnsupportedModel
from verl.engines.saved_model import save_model
from verl.models.causal_lm import CausalLM
from verl.models.networks import ScoreNetwork
from verl.rewards.base import RewardItem
from verl.rewards.config import RewardConfig
from verl.rewards.runner import RewardRunner
from verl.trainer.reward_folder import NamedRewardModel
from verl.trainer.reward_model import RewardModel

CPU = torch.device("cpu")
ITEM = RewardItem(prompt="hi", response="w7 w8", prompt_ids=[1, 5], response_ids=[7, 8, 2])


def reward_folder(folder: Path) -> Path:
    """A reward model of random weights and the word tokenizer."""
    network = ScoreNetwork(CausalLM(tiny_model("llama")))
    with torch.no_grad():
        network.module.score.weight.copy_(torch.linspace(-1, 1, 32))
    save_model(folder, network.module, word_tokenizer())
    return folder


def test_with_the_policys_tokenizer_the_sampled_ids_are_scored_their_end_too(tmp_path: Path) -> None:
    where = reward_folder(tmp_path)
    with RewardRunner(NamedRewardModel(str(where), word_tokenizer(), CPU), RewardConfig(model=str(where))) as rewards:
        rewards.start()
        (result,) = rewards.score([ITEM])
    plain = RewardModel(where, device="cpu")
    assert result.score == pytest.approx(plain.score([[1, 5, 7, 8, 2]])[0], abs=1e-5)
    assert result.score != pytest.approx(plain.score(["hiw7 w8"])[0], abs=1e-2)


def test_with_another_tokenizer_text_is_read(tmp_path: Path) -> None:
    where, other = reward_folder(tmp_path), word_tokenizer()
    other.add_tokens(["new"])
    (score,) = NamedRewardModel(str(where), other, CPU).score_items([ITEM])
    assert score == pytest.approx(RewardModel(where, device="cpu").score(["hiw7 w8"])[0], abs=1e-5)


def test_what_is_no_reward_model_is_found_without_loading_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"reward\.model='.*nowhere' is no folder"):
        NamedRewardModel(str(tmp_path / "nowhere"), word_tokenizer(), CPU)
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM of 2 labels.*bradley_terry"):
        NamedRewardModel(str(tiny_folder(tmp_path / "policy")), word_tokenizer(), CPU)
