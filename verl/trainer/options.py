"""Messages for whoever typed options: the configuration keys in errors and log lines become the words of a command.

The parts that ``verl generate`` and ``verl eval`` are made of name keys of a run's config, which these don't have.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from verl.common.errors import ConfigError, DataError

_SAMPLING = {
    name: f"--{name.replace('_', '-')}"
    for name in ("max_new_tokens", "num_samples", "top_k", "top_p", "min_p", "passing")
}
_BOTH = {
    **_SAMPLING,
    "temperature must": "--temperature must",
    "stop must": "--stop must",
    "trainer.seed": "--seed",
    "data.prompt_key": "--prompt-key",
    "trainer.device": "--device",
    "model.path": "--model",
    "model.tokenizer": "--model",
    "data.chat": "data.chat (a key of verl train)",
}
GENERATE = {**_BOTH, "data.train": "--prompts"}
EVAL = {
    **_BOTH,
    "data.train": "--data",
    "data.ground_truth_key": "--ground-truth-key",
    "data.prompt_template": "--prompt-template",
    "data.system_prompt": "--system-prompt",
    "data.max_train_rows": "--max-rows",
    "reward.name": "--reward",
    "reward.function": "--reward",
    "reward.kwargs": "reward.kwargs (a key of verl train)",
    "reward.timeout_s": "reward.timeout_s (a key of verl train)",
}


@contextmanager
def keys_as_options(options: Mapping[str, str]) -> Iterator[None]:
    """In what the block raises as ConfigError or DataError, and in its warnings, say ``options[key]`` for each key.

    options  ``GENERATE`` or ``EVAL``: what is said by key
    """
    renaming = _Renaming(options)
    handlers = list(logging.getLogger().handlers)
    for handler in handlers:
        handler.addFilter(renaming)
    try:
        yield
    except (ConfigError, DataError) as error:
        kind = ConfigError if isinstance(error, ConfigError) else DataError
        raise kind(renaming.text(str(error))) from error
    finally:
        for handler in handlers:
            handler.removeFilter(renaming)


class _Renaming(logging.Filter):
    """Lets every line through, this library's warnings with their keys renamed. A key in a path or in quotes stays."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__()
        self._options = options
        keys = "|".join(re.escape(key) for key in sorted(options, key=len, reverse=True))
        self._keys = re.compile(rf"(?<![\w./'\"-])({keys})(?![\w/'\"-]|\.\w)")

    def text(self, message: str) -> str:
        return self._keys.sub(lambda match: self._options[match[0]], message)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.startswith("verl.") and record.levelno >= logging.WARNING:  # others ask for no change
            record.msg, record.args = self.text(record.getMessage()), ()
        return True
