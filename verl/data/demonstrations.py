"""Rows with answers to be learned as they are (SFT): a prompt and its answer, or whole conversations.

In: a source, the ``data`` section, a tokenizer. Out: an ``ExampleDataset`` of one answer each, in which the assistant's
turns count. Which tokens those are is ``supervision.py``'s business. Knows nothing of losses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from verl.common.errors import DataError
from verl.data.config import ExampleDataConfig
from verl.data.examples import Answer, Example, ExampleDataset, answer_of
from verl.data.gathering import Gathering, LeftOut
from verl.data.prompts import require_column
from verl.data.sources import SourceRow, read_all
from verl.data.supervision import supervise
from verl.data.vocabulary import warn_of_unknown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DemonstrationDataConfig(ExampleDataConfig):
    """Conversations to learn from and to validate on."""

    response_key: str | None = Field("response", min_length=1)
    """Column with the answer to the prompt. Null: `prompt_key` holds whole conversations, of which every assistant turn
    is learned."""


def load_demonstrations(
    source: Any,
    config: DemonstrationDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    key: str = "data.train",
    max_rows: int | None = None,
) -> ExampleDataset:
    """``supervise`` every row of ``source`` (see ``read_rows`` for what it may be).

    key       the configuration key that ``source`` came from, for messages
    max_rows  use only the first so many rows
    Raises DataError for rows that can't be used, all at once, and when none is left.
    """
    rows = read_all(source, config, key, max_rows)
    gathering = Gathering[Example](key, len(rows))
    limit = config.max_example_tokens
    for row_id, row in enumerate(rows):
        with gathering.judging(row_id, row):
            answer = _encode(row, config, tokenizer)
            if gathering.must_cut(row_id, row, len(answer), limit, config.overlong_examples):
                answer = answer.first_tokens(limit)
            gathering.kept.append(Example(row_id, (answer,), (True,), row.source))
    report = gathering.report("Raise data.max_example_tokens or set data.overlong_examples to drop or right:")
    if not gathering.kept:
        raise DataError(f"{key}: no row is left to learn from: {report.summary()}. Raise data.max_example_tokens")
    warn_of_unknown(tokenizer, key, ((example.row_id, example.source, example.ids) for example in gathering.kept))
    return ExampleDataset(gathering.kept, report)


def _encode(row: SourceRow, config: DemonstrationDataConfig, tokenizer: PreTrainedTokenizerBase) -> Answer:
    """Ids and mask of the whole row. Raises LeftOut where cutting it to the limit would leave no answer."""
    prompt = require_column(row, config.prompt_key, "data.prompt_key")
    text = None if config.response_key is None else require_column(row, config.response_key, "data.response_key")
    if text is not None and not isinstance(text, str):
        raise DataError(f"the answer in column {config.response_key!r} must be text, got {type(text).__name__}")
    made = supervise(tokenizer, prompt, config, answer=text)
    answer = answer_of(made.input_ids, made.labels_mask)
    start, limit = len(answer.prompt_ids), config.max_example_tokens
    if config.overlong_examples == "right" and start >= limit:
        raise LeftOut("answer cut away", f"the answer begins at token {start}, beyond the limit of {limit}")
    return answer
