import pytest
from pydantic import ValidationError

from verl.rollout.config import RolloutConfig


def test_sampling_takes_the_keys_and_changes() -> None:
    config = RolloutConfig(
        temperature=0.7, max_response_tokens=9, min_response_tokens=2, stop=["\n\n"], stop_token_ids=[5]
    )
    params = config.sampling()
    assert (params.temperature, params.max_new_tokens, params.min_new_tokens) == (0.7, 9, 2)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == (("\n\n",), (5,), False)
    assert config.sampling(temperature=0.0, top_k=3).temperature == 0.0


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"temperature": 0}, "greedy"),
        ({"temperature": -1}, "temperature"),
        ({"max_response_tokens": 0}, "max_response_tokens"),
        ({"max_response_tokens": 3, "min_response_tokens": 4}, "min_response_tokens = 4"),
        ({"stop": [""]}, "stop"),
        ({"stop": "abc"}, "stop"),
        ({"top_k": 3}, "top_k"),
    ],
)
def test_bad_keys_are_refused_by_name(keys: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RolloutConfig(**keys)  # type: ignore[arg-type]
