"""Prompt to token ids. No other place of the library renders or encodes a conversation.

In: a prompt (text, or messages), a tokenizer, the ``data`` section. Out: the ids that rollout, length limits,
training and rewards all see. Knows nothing of files, rows or limits.

A rendered template is encoded without the tokenizer's own special tokens, because the template has written them;
plain text is encoded with them, once. Ids never begin with two BOS, and never end with a token that the tokenizer
puts after a text (EOS): the response comes there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from verl.common.errors import ConfigError, DataError
from verl.data.config import PLACEHOLDER, DataConfig
from verl.data.vocabulary import check_known

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message: TypeAlias = dict[str, Any]
Prompt: TypeAlias = str | list[Message]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Message], config: DataConfig) -> list[int]:
    """Ids of ``prompt`` as the model reads it, up to where its response begins; of any length.

    Raises DataError when the prompt is neither text nor messages, the template refuses it or the tokenizer doesn't know
    all of it; ConfigError when the tokenizer has no chat template and the prompt or ``data.chat`` needs one.
    """
    text = render_prompt(tokenizer, prompt, config)
    if uses_chat(tokenizer, prompt, config):
        return encode_rendered(tokenizer, text)
    return _encode_plain(tokenizer, text)


def render_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Message], config: DataConfig) -> str:
    """The text that ``encode_prompt`` encodes. Raises as it does."""
    checked = check_prompt(prompt)
    if uses_chat(tokenizer, checked, config):
        return render_messages(tokenizer, compose(checked, config), config, add_generation_prompt=True)
    if config.system_prompt is not None:
        raise ConfigError(
            f"data.system_prompt needs a chat template, and the prompt is encoded as plain text (data.chat = "
            f"{config.chat!r}, tokenizer {tokenizer.name_or_path!r}). Put the text into data.prompt_template instead"
        )
    return config.prompt_template.replace(PLACEHOLDER, str(checked))


def uses_chat(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Message], config: DataConfig) -> bool:
    """Whether ``prompt`` goes through the chat template. Raises ConfigError when it must and can't."""
    is_text = isinstance(prompt, str)
    if config.chat == "never" and not is_text:
        raise ConfigError(
            "the prompt is a list of messages, which only a chat template can render: data.chat = 'never'"
        )
    if config.chat == "never":
        return False
    if tokenizer.chat_template:
        return True
    if config.chat == "auto" and is_text:
        return False
    reason = "the prompt is a list of messages" if not is_text else "data.chat is 'always'"
    raise ConfigError(
        f"{reason}, but the tokenizer in {tokenizer.name_or_path!r} has no chat template. Use a folder with "
        "chat_template.jinja, or plain-text prompts (data.prompt_key) with data.chat = 'auto'"
    )


def compose(prompt: Prompt, config: DataConfig) -> list[Message]:
    """Messages with ``data.system_prompt`` and ``data.prompt_template`` applied; the argument isn't changed."""
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if users:
        last = messages[users[-1]]
        messages[users[-1]] = {**last, "content": config.prompt_template.replace(PLACEHOLDER, last["content"])}
    if config.system_prompt is not None and all(message["role"] != "system" for message in messages):
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    return messages


def render_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    config: DataConfig,
    *,
    add_generation_prompt: bool,
) -> str:
    """``messages`` through the chat template. Raises DataError with the template's own words when it refuses them."""
    import jinja2

    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **config.chat_template_kwargs,
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        roles = [message["role"] for message in messages]
        raise DataError(f"the chat template of {tokenizer.name_or_path!r} refuses roles {roles}: {error}") from error
    return str(text)


def encode_rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of text whose special tokens are already written in it. Raises as ``encode_text``."""
    return _single_bos(tokenizer, encode_text(tokenizer, text))


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of ``text`` and nothing else. Raises DataError for half a character, and as ``check_known``."""
    _check_text(text)
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    check_known(tokenizer, text, ids)
    return ids


def check_prompt(value: object) -> Prompt:
    """``value`` as text or as messages that end before the response. Raises DataError saying what it is instead."""
    if isinstance(value, str):
        if not value.strip():
            raise DataError("the prompt is empty")
        return value
    messages = check_messages(value)
    if messages[-1]["role"] == "assistant":
        raise DataError("the prompt ends with an assistant message: it must end where the response begins")
    return messages


def check_messages(value: object) -> list[Message]:
    """``value`` as a list of {role, content, ...} with text contents; keys that are None are dropped.

    Files with a fixed schema give every message every key, and templates ask whether a key is there.
    """
    if not isinstance(value, list | tuple):
        raise DataError(f"a prompt is text or a list of {{role, content}} messages, got {_describe(value)}")
    if not value:
        raise DataError("the prompt is an empty list of messages")
    return [_check_message(message, i) for i, message in enumerate(value)]


def _check_message(message: object, position: int) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"message {position} must be {{role, content}}, got {_describe(message)}")
    known = {str(key): value for key, value in message.items() if value is not None}
    if not isinstance(known.get("role"), str):
        raise DataError(f"message {position} needs a role (text); it has the keys {sorted(known)}")
    if "tool_calls" in known:
        known.setdefault("content", "")
    if not isinstance(known.get("content"), str):
        raise DataError(f"message {position} needs content that is text, got {_describe(known.get('content'))}")
    return known


def _encode_plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    bare = encode_text(tokenizer, text)
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    for start in range(len(ids) - len(bare) + 1 if bare else 0):
        if ids[start : start + len(bare)] == bare:
            return _single_bos(tokenizer, ids[: start + len(bare)])
    return _single_bos(tokenizer, ids)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise DataError(f"the text holds {half!a}, half of a character that was cut in two: no text") from error


def _single_bos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    bos = tokenizer.bos_token_id
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    return ids


def _describe(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
