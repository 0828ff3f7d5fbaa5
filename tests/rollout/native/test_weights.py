import pytest
import torch

from tests.tiny import tiny_model
from verl.common.errors import ConfigError, ShapeError, StaleWeights
from verl.rollout.native.weights import Weights


def test_in_place_changes_are_seen_until_they_are_announced() -> None:
    module = tiny_model("llama")
    weights = Weights(module)
    weights.check_fresh(0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(input_ids=torch.tensor([[5, 6]])).logits.sum().backward()
    weights.check_fresh(0)
    optimizer.step()
    with pytest.raises(StaleWeights, match=r"version 0 .* weights_changed"):
        weights.check_fresh(0)
    weights.accept()
    weights.check_fresh(1)


def test_a_load_that_fails_leaves_weights_that_nobody_may_use() -> None:
    module, other = tiny_model("llama"), tiny_model("llama", seed=1).state_dict()
    weights, (first, *_) = Weights(module), other
    with pytest.raises(
        ConfigError, match=r"no weight 'model.embed_tokens.wieght'; did you mean 'model.embed_tokens.weight'"
    ):
        weights.load([("model.embed_tokens.wieght", other["model.embed_tokens.weight"])])
    with pytest.raises(ShapeError, match=r"\[64, 32\], got \[3\]"):
        weights.load([("model.embed_tokens.weight", torch.zeros(3))])
    with pytest.raises(StaleWeights, match="no value for"):
        weights.load([(first, other[first])])
    with pytest.raises(StaleWeights, match="load a whole set"):
        weights.check_fresh(0)
    weights.load(other.items())
    weights.check_fresh(0)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=0)


def test_tied_weights_may_come_once_or_twice() -> None:
    module = tiny_model("gpt2")
    module.set_output_embeddings(torch.nn.Linear(32, 64, bias=False))
    module.get_output_embeddings().weight = module.get_input_embeddings().weight
    weights, state = Weights(module), module.state_dict()
    weights.load(list(state.items()))
    weights.load([(name, value) for name, value in state.items() if name != "lm_head.weight"])


def test_moved_storage_is_noticed_once() -> None:
    module = tiny_model("llama")
    weights = Weights(module)
    assert not weights.moved()
    module.lm_head.weight.data = module.lm_head.weight.data.clone()
    assert weights.moved() and not weights.moved()
