import pytest
from pydantic import ValidationError

from verl.data.config import DataConfig


def test_defaults_make_a_config():
    config = DataConfig()
    assert (config.prompt_key, config.overlong_prompts, config.max_prompt_tokens) == ("prompt", "drop", 1024)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("train", [], "empty list"),
        ("val", ["a.jsonl", ""], "empty list or name"),
        ("prompt_template", "Question:", "{prompt}"),
        ("chat_template_kwargs", {"tokenize": True}, "tokenize"),
        ("max_prompt_tokens", 0, "greater than or equal to 1"),
        ("max_train_rows", 0, "greater than or equal to 1"),
        ("overlong_prompts", "filter", "'drop', 'error', 'left' or 'right'"),
        ("chat", "sometimes", "'auto', 'always' or 'never'"),
    ],
)
def test_wrong_values_are_refused(key, value, said):
    with pytest.raises(ValidationError, match=key) as caught:
        DataConfig(**{key: value})
    assert said in str(caught.value)
