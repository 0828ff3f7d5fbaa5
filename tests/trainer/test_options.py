from __future__ import annotations

import logging

import pytest

from verl.common.errors import ConfigError, DataError, UnknownName
from verl.data.config import DataConfig
from verl.trainer.options import EVAL, GENERATE, keys_as_options


def test_every_key_of_the_data_section_that_has_an_option_is_one() -> None:
    said = {key.removeprefix("data.") for key in EVAL if key.startswith("data.")}
    assert said <= set(DataConfig.model_fields)


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (DataError("data.train: no such file: 'x'"), "--prompts: no such file: 'x'"),
        (ConfigError("trainer.device='tpu'. Set trainer.device=cpu."), "--device='tpu'. Set --device=cpu."),
        (DataError("set data.prompt_key to one of 'a', 'data.train'"), "set --prompt-key to one of 'a', 'data.train'"),
        (DataError("no file '/x/data.train/top_k.jsonl'"), "no file '/x/data.train/top_k.jsonl'"),
        (DataError("data.training and data.train.x"), "data.training and data.train.x"),
    ],
)
def test_errors_say_options(raised: Exception, said: str) -> None:
    with pytest.raises(type(raised)) as found, keys_as_options(GENERATE):
        raise raised
    assert str(found.value) == said


def test_errors_of_other_forms() -> None:
    with pytest.raises(ConfigError, match="unknown reward 'x'"), keys_as_options(EVAL):
        raise UnknownName("reward", "x", ["exact"])
    with pytest.raises(KeyError, match=r"trainer\.device"), keys_as_options(EVAL):
        raise KeyError("trainer.device")


def test_warnings_say_options_within_the_block(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "verl")
    log = logging.getLogger("verl.data.vocabulary")
    with keys_as_options(EVAL):
        log.warning("%s: %d rows", "data.train", 3)
        log.info("SamplingParams(top_k=0)")
        logging.getLogger("other").warning("data.train")
    log.warning("data.train")
    assert caplog.messages == ["--data: 3 rows", "SamplingParams(top_k=0)", "data.train", "data.train"]
