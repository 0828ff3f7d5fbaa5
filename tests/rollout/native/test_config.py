import pytest
from pydantic import ValidationError

from verl.rollout import ROLLOUT_ENGINES
from verl.rollout.config import RolloutConfig


def test_the_engines_config_extends_the_shared_one() -> None:
    config = ROLLOUT_ENGINES.load("native").Config(temperature=0.5)
    assert isinstance(config, RolloutConfig) and config.name == "native"
    assert (config.block_size, config.cache_tokens, config.prefix_cache, config.use_cuda_graph) == (
        16,
        None,
        True,
        True,
    )


def test_a_cache_smaller_than_a_block_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"cache_tokens = 15 .* block_size = 16"):
        ROLLOUT_ENGINES.load("native").Config(cache_tokens=15)
