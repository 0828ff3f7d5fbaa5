from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from tests.tiny import FAMILIES, VOCAB, tiny_folder, word_tokenizer
from verl.common.errors import ConfigError, DataError, UnsupportedModel
from verl.rewards.base import RewardItem, RewardResult
from verl.rewards.config import RewardConfig
from verl.rewards.runner import RewardRunner
from verl.trainer.reward_model import RewardModel

BERT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
ROWS = [[5, 6, 7], [5, 6, 7, 0], [5, 6, 7, 0, 0], [9, 8, 7], [5], [10, 11, 12, 13]]


def classifier(family: str = "llama", labels: int = 1) -> PreTrainedModel:
    sizes = BERT if family == "bert" else FAMILIES[family]
    config = AutoConfig.for_model(
        family, vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2, num_labels=labels, **sizes
    )
    generator = torch.Generator().manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return model


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "bert"])
def test_scores_do_not_depend_on_neighbours_or_padding_ids(family: str) -> None:
    model = RewardModel(classifier(family), cache_size=0)
    together = model.score(ROWS)
    alone = [model.score([row])[0] for row in ROWS]
    backwards = RewardModel(model.model, cache_size=0, max_batch_tokens=4).score(ROWS[::-1])[::-1]
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(together, backwards, rtol=0, atol=1e-5)
    assert len({round(score, 4) for score in together}) == len(ROWS)
    assert model.model is not None
    assert model.model.config.pad_token_id == 0


def test_the_score_is_the_heads_at_the_last_token() -> None:
    module = classifier()
    with torch.no_grad():
        hidden = module.model(input_ids=torch.tensor([[5, 6, 0]])).last_hidden_state[0, -1]
        expected = float(hidden @ module.score.weight[0])
    assert RewardModel(module).score([(5, 6, 0)])[0] == pytest.approx(expected, abs=1e-5)


class Counting(RewardModel):
    rows = 0

    def _forward(self, rows: list[list[int]]) -> list[float]:
        self.rows += len(rows)
        return super()._forward(rows)


def test_the_cache_key_is_the_whole_sequence() -> None:
    model = Counting(classifier(), cache_size=3)
    a, b = [5] * 130, [5] * 129 + [6]
    first = model.score([a, b, a])
    assert first[0] == first[2] != first[1]
    assert model.rows == 2
    assert model.score([torch.tensor(b), tuple(a)]) == [first[1], first[0]]
    assert model.rows == 2
    model.score([[7], [8]])  # the least recently used one goes
    model.score([a])
    assert model.rows == 4
    model.score([b])
    assert model.rows == 5
    model.clear_cache()
    model.score([b])
    assert model.rows == 6


def test_a_cache_of_none() -> None:
    model = Counting(classifier(), cache_size=0)
    assert model.score([[5]]) == model.score([[5]])
    assert model.rows == 2


class LocalAsyncRewardModel(RewardModel):
    """As a user writes it: a cache of its own around the parent's score."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._score_cache: dict[int, list[float]] = {}

    def score(self, sequences: Any) -> list[float]:
        cache_key = hash(tuple(seq[:128] for seq in sequences))
        if cache_key in self._score_cache:
            return self._score_cache[cache_key]
        scores = super().score(sequences)
        self._score_cache[cache_key] = scores
        return scores


def test_a_subclass_that_calls_super() -> None:
    plain = RewardModel(classifier())
    model = LocalAsyncRewardModel(classifier(), word_tokenizer())
    assert model.score([(5, 6), (7,)]) == plain.score([(5, 6), (7,)])
    assert model.score(["hi w6"]) == plain.score([(1, 5, 6)])
    assert model.score_async([(5, 6), (7,)]).result(timeout=30) == plain.score([(5, 6), (7,)])
    assert len(model._score_cache) == 2
    with RewardRunner(model) as runner:
        result = runner.score([RewardItem(prompt="hi", response=" w6")])[0]
    assert result.score == plain.score([(1, 5, 6)])[0]


def test_a_subclass_without_a_model() -> None:
    class Longest(RewardModel):
        def score(self, sequences: Any) -> list[float]:
            return [float(len(sequence)) for sequence in sequences]

    with RewardRunner(Longest()) as runner:
        assert [r.score for r in runner.score([RewardItem(prompt="ab", response="cde")])] == [5]
    with pytest.raises(ConfigError, match="no model"):
        RewardModel().score([[5]])


def test_a_folder_scores_text_messages_and_ids(tmp_path: Path) -> None:
    classifier().save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    model = RewardModel(tmp_path, device="cpu")
    text, with_bos, ids = model.score(["hi w6", "<s> hi w6", [1, 5, 6]])  # one BOS, not two
    assert text == with_bos == ids == pytest.approx(RewardModel(classifier()).score([[1, 5, 6]])[0], abs=1e-5)
    chat = [{"role": "user", "content": "hi"}]
    item = RewardItem(prompt=chat, response="w6", prompt_ids=[9], response_ids=[9])
    assert model.score_items([item]) == model.score([[1, 3, 5, 4, 6, 2]])
    assert model.score([[*chat, {"role": "assistant", "content": "w6"}]]) == model.score([[1, 3, 5, 4, 6, 2]])


def test_items_without_a_tokenizer_are_scored_by_their_ids() -> None:
    model = RewardModel(classifier())
    items = [RewardItem(prompt="?", response="!", prompt_ids=[5], response_ids=ids) for ids in ([6, 2], [7])]
    assert model.score_items(items) == model.score([[5, 6, 2], [5, 7]])
    with RewardRunner(model) as runner, pytest.raises(ConfigError, match="no tokenizer"):
        runner.score([RewardItem(prompt="?", response="!")])


def test_an_item_that_does_not_fit_fails_alone() -> None:
    model = RewardModel(classifier())
    items = [RewardItem(prompt="?", response="!", prompt_ids=[5], response_ids=ids) for ids in ([6], [6] * 256)]
    good, bad = model.score_items(items)
    assert isinstance(bad, RewardResult)
    assert bad.failure == "error"
    assert "256 tokens, got 257" in bad.detail
    with RewardRunner(model, RewardConfig(on_failure="zero")) as runner:
        assert [r.score for r in runner.score(items)] == [good, 0]
    for row in ([], [6] * 257):
        with pytest.raises(DataError, match="1 to 256 tokens"):
            model.score([row])


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="num_labels=1"):
        RewardModel(classifier(labels=2))
    with pytest.raises(UnsupportedModel, match=r"lack score\.weight"):
        RewardModel(tiny_folder(tmp_path), device="cpu")
    kept = {name: tensor for name, tensor in classifier().state_dict().items() if "layers.1.mlp" not in name}
    classifier().save_pretrained(tmp_path / "part", state_dict=kept)
    with pytest.raises(UnsupportedModel, match=r"lack model\.layers\.1\.mlp\.down_proj\.weight, "):
        RewardModel(tmp_path / "part", device="cpu")
    with pytest.raises(ConfigError, match="max_batch_tokens"):
        RewardModel(max_batch_tokens=0)
