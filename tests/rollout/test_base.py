import copy
import pickle
from dataclasses import replace

import pytest

from verl.batch import FinishReason
from verl.common.errors import ConfigError
from verl.rollout.base import Response, SamplingParams


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 1e-38}, r"temperature must be 0 \(greedy\), or >= 1e-06"),  # logits become infinite
        ({"temperature": 1e-300}, "temperature"),  # 0 in float32
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": 1.0}, "min_p"),
        ({"min_new_tokens": 9}, "min_new_tokens"),
        ({"stop": ("a", "")}, "stop"),
        ({"stop": "abc"}, "stop must be a list"),
    ],
)
def test_impossible_settings_name_the_key(settings: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        SamplingParams(**{"max_new_tokens": 8, **settings})  # type: ignore[arg-type]


def test_defaults_are_neutral() -> None:
    params = SamplingParams(max_new_tokens=3)
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.min_new_tokens) == (
        1.0,
        0,
        1.0,
        0.0,
        0,
    )
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == ((), (), False)


def test_lists_become_tuples_so_that_settings_can_be_compared() -> None:
    a = SamplingParams(max_new_tokens=3, stop=["x"], stop_token_ids=[4])  # type: ignore[arg-type]
    assert hash(a) == hash(SamplingParams(max_new_tokens=3, stop=("x",), stop_token_ids=(4,)))


def test_a_response_passes_between_processes_as_it_is() -> None:
    response = Response(
        response_ids=[5, 151_935], log_probs=[-0.1, float("-inf")], finish_reason=FinishReason.LENGTH, policy_version=2,
        policy_versions=[2, 3],
    )  # fmt: skip
    back = pickle.loads(pickle.dumps(response))
    assert back == response and copy.deepcopy(response) == response
    assert [type(back.response_ids[0]), type(back.log_probs[0]), type(back.finish_reason)] == [int, float, FinishReason]
    long = replace(response, response_ids=[1] * 1000, log_probs=[-1.5] * 1000, policy_versions=[2] * 1000)
    assert len(pickle.dumps(long)) < 3 * 8 * 1000 + 1000
