import pytest
from pydantic import ValidationError

from verl.rewards import REWARDS
from verl.rewards.config import RewardConfig


def test_every_name_loads() -> None:
    assert sorted(REWARDS) == ["characters", "exact", "gsm8k", "math", "number", "reasoning_gym"]
    assert all(callable(REWARDS.load(name)) for name in REWARDS)


def test_defaults() -> None:
    config = RewardConfig(name="gsm8k")
    assert (config.timeout_s, config.workers, config.on_failure, config.cache) == (30, 2, "drop", False)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "gsm8"}, "did you mean 'gsm8k'"),
        ({"name": "gsm8k", "function": "a.b:c"}, "keep one"),
        ({"model": "folder", "function": "math:floor"}, "'function' \\('math:floor'\\) and 'model' \\('folder'\\)"),
        ({"function": "nowhere.py:f"}, "no file"),
        ({"function": "nowhere"}, "file.py:function"),
        ({"name": "gsm8k", "timeout_s": 0}, "timeout_s"),
        ({"name": "gsm8k", "workers": -1}, "workers"),
        ({"name": "gsm8k", "on_failure": "ignore"}, "on_failure"),
        ({"name": "gsm8k", "timeout": 3}, "timeout"),
    ],
)
def test_wrong_keys_are_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RewardConfig(**keys)  # type: ignore[arg-type]
