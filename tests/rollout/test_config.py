import pytest
from pydantic import ValidationError

from verl.rollout.config import RolloutConfig


def test_sampling_takes_the_keys_and_changes() -> None:
    config = RolloutConfig(temperature=0.7, max_response_tokens=9, stop=["\n\n"], stop_token_ids=[5])
    params = config.sampling()
    assert (params.temperature, params.max_new_tokens) == (0.7, 9)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == (("\n\n",), (5,), False)
    assert config.sampling(temperature=0.0, top_k=3).temperature == 0.0


def test_training_samples_from_the_whole_distribution() -> None:
    """What log-probs leave out would make the sampler another policy than the one that learns."""
    params = RolloutConfig(max_response_tokens=9).sampling()
    assert (params.top_k, params.top_p, params.min_p, params.min_new_tokens) == (0, 1.0, 0.0, 0)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"temperature": 0}, "greedy"),
        ({"temperature": -1}, "temperature"),
        ({"max_response_tokens": 0}, "max_response_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": "abc"}, "stop"),
        ({"top_k": 3}, "top_k"),
        ({"top_p": 0.9}, "top_p"),
        ({"min_p": 0.1}, "min_p"),
        ({"min_response_tokens": 2}, "min_response_tokens"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ],
)
def test_bad_keys_are_refused_by_name(keys: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RolloutConfig(**keys)  # type: ignore[arg-type]
