"""Conversations with their answers, to ids and the mask of what is learned (SFT).

In: messages with assistant turns, or a prompt and its answer. Out: ids and a mask that is True at the ids the model
would have sampled: each assistant turn and the token that ends it; no prompt, system or tool token. Knows no tensors.

Nothing here is shifted: the label of position t is the token at t itself, and its log-prob comes from the model's
output at position t - 1. So position 0 can't be learned, and its mask is always False.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.common.errors import DataError
from verl.data.chat import (
    Message,
    check_messages,
    check_prompt,
    compose,
    encode_prompt,
    encode_rendered,
    encode_text,
    render_messages,
    uses_chat,
)
from verl.data.config import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Supervised:
    """One example. ``labels_mask``: as long as ``input_ids``, True where the token at that very position is learned."""

    input_ids: tuple[int, ...]
    labels_mask: tuple[bool, ...]


def supervise(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Message],
    config: DataConfig,
    *,
    answer: str | None = None,
) -> Supervised:
    """Ids and mask of one example.

    prompt      a prompt as for ``encode_prompt``, with ``answer``; or messages with assistant turns, without
    answer      the one response. Plain text is ended with EOS; a chat template ends it its own way
    Without ``{% generation %}`` blocks in the template, what comes before an answer is checked to be what
    ``encode_prompt`` makes of it, so that SFT and rollout see the same ids.
    Raises DataError when there is no answer, or the chat template renders a conversation's beginning differently from
    the whole and marks no ``{% generation %}`` block.
    """
    is_chat = uses_chat(tokenizer, prompt, config)
    messages = _with_answer(prompt, answer, config)
    if answer is not None and not is_chat:
        ids, mask = _join(tokenizer, encode_prompt(tokenizer, prompt, config), answer)
    else:
        template = tokenizer.get_chat_template(tools=config.chat_template_kwargs.get("tools"))
        has_blocks = _GENERATION_BLOCK.search(template)
        ids, mask = (_mask_by_blocks if has_blocks else _mask_by_prefixes)(tokenizer, messages, config)
    mask[:1] = [False] * len(mask[:1])
    if not any(mask):
        raise DataError("no token of an answer: the example would teach nothing")
    return Supervised(tuple(ids), tuple(mask))


def _with_answer(prompt: str | Sequence[Message], answer: str | None, config: DataConfig) -> list[Message]:
    if answer is not None:
        if not answer:
            raise DataError("the answer is empty")
        return [*compose(check_prompt(prompt), config), {"role": "assistant", "content": answer}]
    if isinstance(prompt, str):
        raise DataError("a text prompt needs its answer; without one, give messages with assistant turns")
    messages = check_messages(prompt)
    if all(message["role"] != "assistant" for message in messages):
        raise DataError(f"no assistant turn to learn: the roles are {[message['role'] for message in messages]}")
    for i, message in enumerate(messages):
        if message == {"role": "assistant", "content": ""}:
            raise DataError(f"message {i}, an assistant turn, is empty: it would teach to say nothing")
    return compose(messages, config)


def _join(tokenizer: PreTrainedTokenizerBase, ids: list[int], answer: str) -> tuple[list[int], list[bool]]:
    learned = encode_text(tokenizer, answer)
    if not learned:
        raise DataError("the answer is empty")
    eos = tokenizer.eos_token_id
    if eos is not None and learned[-1] != eos:
        learned.append(eos)
    return ids + learned, [False] * len(ids) + [True] * len(learned)


def _mask_by_blocks(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], config: DataConfig
) -> tuple[list[int], list[bool]]:
    """The template marks assistant text itself; a special token right behind a block ends that turn and counts."""
    ids = encode_rendered(tokenizer, render_messages(tokenizer, messages, config, add_generation_prompt=False))
    marked: Any = tokenizer.apply_chat_template(
        messages,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **config.chat_template_kwargs,
    )
    removed = len(marked["input_ids"]) - len(ids)
    mask = [bool(flag) for flag in marked["assistant_masks"]][removed:]
    special = _special_ids(tokenizer)
    ends = [t for t in range(1, len(ids)) if mask[t - 1] and not mask[t] and ids[t] in special]
    for t in ends:
        mask[t] = ids[t - 1] not in special
    return ids, mask


def _mask_by_prefixes(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], config: DataConfig
) -> tuple[list[int], list[bool]]:
    """A turn is what the conversation up to it has beyond the prompt before it, both as ids."""
    whole = render_messages(tokenizer, messages, config, add_generation_prompt=False)
    ids = encode_rendered(tokenizer, whole)
    mask = [False] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render_messages(tokenizer, messages[:i], config, add_generation_prompt=True)
        until = render_messages(tokenizer, messages[: i + 1], config, add_generation_prompt=False)
        start = _prefix_length(tokenizer, before, whole, ids)
        stop = _prefix_length(tokenizer, until, whole, ids) if until != whole else len(ids)
        stop = _end_of_turn(tokenizer, ids, start, stop)
        mask[start:stop] = [True] * (stop - start)
    return ids, mask


def _prefix_length(tokenizer: PreTrainedTokenizerBase, text: str, whole: str, ids: list[int]) -> int:
    """How many of ``ids`` encode ``text``. Raises DataError when ``whole`` doesn't begin so, or no token ends there."""
    prefix = encode_rendered(tokenizer, text)
    if ids[: len(prefix)] == prefix:
        return len(prefix)
    if whole.startswith(text):
        raise DataError(
            f"the text {text[-20:]!r} before and {whole[len(text) :][:20]!r} after a turn's border make one token "
            "together, which sampling never does: remove white space at the border"
        )
    raise DataError(
        f"the chat template of {tokenizer.name_or_path!r} renders a conversation's beginning differently when more "
        "follows, so which tokens are the answer can't be told. Use a template with {% generation %} blocks, or one "
        "example for each assistant turn (prompt and answer)"
    )


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, ids: list[int], start: int, stop: int) -> int:
    """End of the turn in ids[start:stop]: behind its last special token, if only white space follows that."""
    special = _special_ids(tokenizer)
    last = next((t for t in reversed(range(start, stop)) if ids[t] in special), None)
    if last is None or str(tokenizer.decode(ids[last + 1 : stop])).strip():
        return stop
    return last + 1


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)
