from dataclasses import replace

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tests.rollout.engines import build, prompt, request
from tests.tiny import tiny_model
from verl.batch import FinishReason
from verl.common.errors import ConfigError, DataError
from verl.models.causal_lm import CausalLM
from verl.rollout.base import Response
from verl.rollout.native.request_checks import RequestChecks


def test_prompt_comes_back_as_plain_integers() -> None:
    checks = RequestChecks(CausalLM(tiny_model("llama")))
    assert checks.prompt(0, request((5, 6, 0))) == [5, 6, 0]


@pytest.mark.parametrize(
    ("length", "tokens", "fits"), [(255, 1, True), (1, 255, True), (256, 1, False), (200, 57, False)]
)
def test_prompt_and_response_fit_the_positions_exactly(length: int, tokens: int, fits: bool) -> None:
    checks = RequestChecks(CausalLM(tiny_model("gpt2")))
    if fits:
        assert len(checks.prompt(0, request(prompt(length), tokens))) == length
    else:
        with pytest.raises(ConfigError, match=r"has 256 \(max_position_embeddings\)"):
            checks.prompt(0, request(prompt(length), tokens))


def test_rows_past_the_original_length_of_longrope_are_refused() -> None:
    """There the angles of all rows change with the longest one."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [9.0] * 8}
    config = AutoConfig.for_model(
        "phi3", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0, max_position_embeddings=256, original_max_position_embeddings=16,
        rope_parameters=rope,
    )  # fmt: skip
    engine = build(module=AutoModelForCausalLM.from_config(config).eval())
    assert len(engine.generate([request(prompt(8), 8, ignore_eos=True)])[0].response_ids) == 8
    with pytest.raises(ConfigError, match=r"has 16 .*longrope"):
        engine.generate([request(prompt(8), 9)])


def test_a_resumed_response_is_checked_as_the_prompt_is() -> None:
    checks = RequestChecks(CausalLM(tiny_model("llama")))
    paused = Response(
        response_ids=[5, 6],
        log_probs=[-1.0, -1.0],
        finish_reason=FinishReason.ABORT,
        policy_version=0,
        policy_versions=[0, 0],
    )
    assert checks.prompt(0, replace(request([7]), resume=paused)) == [7]
    with pytest.raises(DataError, match="request 3: resumed id 64 is outside the vocabulary of 64"):
        checks.prompt(3, replace(request([7]), resume=replace(paused, response_ids=[5, 64])))
    for part in ({"log_probs": [-1.0]}, {"policy_versions": []}):
        with pytest.raises(DataError, match="one of each for every token"):
            checks.prompt(0, replace(request([7]), resume=replace(paused, **part)))
