"""Rows with judged answers to examples: a chosen and a rejected answer, or one answer and whether it is desirable.

In: a source, the ``data`` section, a tokenizer. Out: an ``ExampleDataset`` whose answers carry their ids. Both answers
of a pair share the ids of their prompt, and prompts are encoded as for a rollout. Knows nothing of losses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field

from verl.common.errors import DataError
from verl.data.chat import check_messages, check_prompt, encode_prompt
from verl.data.config import ExampleDataConfig
from verl.data.examples import Answer, Example, ExampleDataset
from verl.data.gathering import OVERLONG, Gathering, Incident, LeftOut, name_some, overlong
from verl.data.prompts import cut_prompt, require_column
from verl.data.sources import SourceRow, read_all
from verl.data.supervision import supervise
from verl.data.vocabulary import warn_of_unknown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class PreferenceDataConfig(ExampleDataConfig):
    """Judged answers for training and validation."""

    chosen_key: str = Field("chosen", min_length=1)
    """Column with the better answer of a pair: text, or messages of which the last is the answer."""
    rejected_key: str = Field("rejected", min_length=1)
    """Column with the worse answer of a pair."""
    response_key: str = Field("response", min_length=1)
    """Column with one answer, for algorithms that need no pairs; with `judged_keys`, its name in each of them."""
    label_key: str = Field("label", min_length=1)
    """Column that says whether that answer is desirable: true, false, 1 or 0; with `judged_keys`, its name in each of
    them."""
    judged_keys: list[str] = []
    """Columns that each hold an answer (`response_key`) to the row's prompt and its label (`label_key`). Each desirable
    one with each undesirable one makes a pair. Empty: the other keys name the columns themselves."""


Judged = tuple[Any, ...]
"""Answers of one example as the row has them."""


def load_preferences(
    source: Any,
    config: PreferenceDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_paired: bool,
    key: str = "data.train",
    max_rows: int | None = None,
) -> ExampleDataset:
    """Read and encode every example of ``source`` (see ``read_rows`` for what it may be).

    is_paired  pairs of a chosen and a rejected answer, or single ones with a label
    key        the configuration key that ``source`` came from, for messages
    Examples beyond a limit, by their prompt or as a whole, are dropped, cut, or an error, as the section says, and are
    named in any case; a pair whose answers are the same ids teaches nothing and is warned of, and so are single answers
    that all have one label. Raises DataError for rows that can't be used, all at once, and when nothing is left.
    """
    rows = read_all(source, config, key, max_rows)
    gathering = Gathering[Example](key, len(rows))
    for row_id, row in enumerate(rows):
        with gathering.judging(row_id, row):
            judged = list((_pairs if is_paired else _labelled)(row, config))
            if not judged:
                raise LeftOut("no pair", "its answers are all of one label")
            for answers, is_chosen in judged:
                with gathering.judging(row_id, row):
                    prompt = require_column(row, config.prompt_key, "data.prompt_key")
                    made, longest_cut = _encode(prompt, answers, config, tokenizer)
                    gathering.kept.append(Example(row_id, made, is_chosen, row.source))
                    if longest_cut:
                        gathering.note_cut(row_id, row, f"prompt and answer have {longest_cut} tokens")
    report = gathering.report(
        "Raise the limit, or set data.overlong_prompts or data.overlong_examples to drop or right:"
    )
    if not gathering.kept:
        raise DataError(f"{key}: no example is left to learn from: {report.summary()}")
    _warn_of_equal_pairs(gathering.kept, key)
    _warn_of_one_label(gathering.kept, key)
    warn_of_unknown(tokenizer, key, ((example.row_id, example.source, example.ids) for example in gathering.kept))
    return ExampleDataset(gathering.kept, report)


def _pairs(row: SourceRow, config: PreferenceDataConfig) -> Iterator[tuple[Judged, tuple[bool, ...]]]:
    if not config.judged_keys:
        chosen = require_column(row, config.chosen_key, "data.chosen_key")
        yield (chosen, require_column(row, config.rejected_key, "data.rejected_key")), (True, False)
        return
    judged = [_judged(row, key, config) for key in config.judged_keys]
    for good in (answer for answer, label in judged if label):
        for bad in (answer for answer, label in judged if not label):
            yield (good, bad), (True, False)


def _labelled(row: SourceRow, config: PreferenceDataConfig) -> Iterator[tuple[Judged, tuple[bool, ...]]]:
    for key in config.judged_keys or [""]:
        answer, label = _judged(row, key, config)
        yield (answer,), (label,)


def _judged(row: SourceRow, key: str, config: PreferenceDataConfig) -> tuple[Any, bool]:
    """An answer and its label: columns of the row or, with a ``key``, of that column of it."""
    if key:
        inner = require_column(row, key, "data.judged_keys")
        if not isinstance(inner, Mapping):
            raise DataError(f"column {key!r} (data.judged_keys) must hold an answer and its label, got {inner!r}")
        row = replace(row, values=dict(inner))
    label = require_column(row, config.label_key, "data.label_key")
    if not (isinstance(label, bool) or (isinstance(label, int | float) and label in (0, 1))):
        raise DataError(f"the label in column {config.label_key!r} (data.label_key) is true or false, got {label!r}")
    return require_column(row, config.response_key, "data.response_key"), bool(label)


def _encode(
    prompt: Any, answers: Judged, config: PreferenceDataConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[tuple[Answer, ...], int]:
    """Ids of each answer behind the one prompt, and the length of the longest that had to be cut, 0 if none had to.

    Raises LeftOut or Refused where the section doesn't say to cut.
    """
    checked = check_prompt(prompt)
    prompt_ids = tuple(encode_prompt(tokenizer, checked, config))
    if not prompt_ids:
        raise DataError("the prompt has no tokens")
    limit = config.max_prompt_tokens
    rule = config.overlong_prompts
    if len(prompt_ids) > limit and rule in ("drop", "error"):
        raise overlong(rule, f"its prompt has {len(prompt_ids)} tokens, limit {limit} (data.max_prompt_tokens)")
    cut = cut_prompt(prompt_ids, config)
    made = [_encode_answer(checked, prompt_ids, cut, answer, config, tokenizer) for answer in answers]
    uncut = [length for answer, length in made if length > len(answer)]
    return tuple(answer for answer, _ in made), max(uncut, default=0)


def _encode_answer(
    prompt: Any,
    prompt_ids: tuple[int, ...],
    cut: tuple[int, ...],
    answer: Any,
    config: PreferenceDataConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[Answer, int]:
    """The answer behind the prompt ``cut``, within the limit, and the length that it would have without limits."""
    supervised = supervise(tokenizer, prompt, config, answer=_text_of(answer, prompt))
    start = len(prompt_ids)
    if supervised.input_ids[:start] != prompt_ids:
        raise DataError("the chat template renders the prompt differently when an answer follows it")
    whole = Answer(cut, supervised.input_ids[start:], supervised.labels_mask[start:])
    limit, rule = config.max_example_tokens, config.overlong_examples
    if len(whole) > limit and rule != "right":
        raise overlong(rule, f"prompt and answer have {len(whole)} tokens, limit {limit} (data.max_example_tokens)")
    answer = whole.first_tokens(limit)
    if not any(answer.response_mask):
        raise LeftOut(OVERLONG, f"no token of an answer is within the limit of {limit} (data.max_example_tokens)")
    return answer, len(supervised.input_ids)


def _text_of(answer: Any, prompt: Any) -> str:
    """The answer's text: itself, or the content of the one message that follows the prompt's."""
    if isinstance(answer, str):
        return answer
    messages = check_messages(answer)
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if messages[-1]["role"] != "assistant" or messages[:-1] not in ([], before):
        raise DataError(
            "an answer is text, one assistant message, or the messages of its prompt and one assistant message; got "
            f"the roles {[message['role'] for message in messages]}"
        )
    return str(messages[-1]["content"])


def _warn_of_equal_pairs(examples: list[Example], key: str) -> None:
    equal = [
        Incident(example.row_id, f"row {example.row_id} of {example.source}", "chosen and rejected are the same ids")
        for example in examples
        if len(example.answers) == 2 and example.answers[0].response_ids == example.answers[1].response_ids
    ]
    if equal:
        log.warning("%s: %d pairs teach nothing: %s", key, len(equal), name_some(equal))


def _warn_of_one_label(examples: list[Example], key: str) -> None:
    labels = {label for example in examples for label in example.is_chosen}
    if len(labels) == 1:
        word, other = ("desirable", "undesirable") if labels == {True} else ("undesirable", "desirable")
        log.warning(
            "%s: all %d answers are %s, and there is no %s one to tell them from: is data.label_key right?",
            key,
            len(examples),
            word,
            other,
        )
