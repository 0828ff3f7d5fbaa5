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
from verl.data.prompts import Incident, LoadReport, require_column
from verl.data.sources import SourceRow, raise_problems, read_all
from verl.data.supervision import AnswerCut, supervise

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
    kept: list[Example] = []
    dropped: dict[str, list[Incident]] = {}
    cut: list[Incident] = []
    problems: list[str] = []
    rows = read_all(source, config, key, max_rows)
    limit = config.max_example_tokens
    for row_id, row in enumerate(rows):
        try:
            answer = _encode(row, config, tokenizer)
        except AnswerCut as error:
            dropped.setdefault("answer cut away", []).append(Incident(row_id, row.where, str(error)))
            continue
        except DataError as error:
            problems.append(f"{row.where} (row {row_id}): {error}")
            continue
        if len(answer) > limit:
            found = Incident(row_id, row.where, f"{len(answer)} tokens, limit {limit}")
            if config.overlong_examples != "right":
                dropped.setdefault("overlong", []).append(found)
                continue
            answer = answer.first_tokens(limit)
            cut.append(found)
        kept.append(Example(row_id, (answer,), (True,), row.source))
    if problems:
        raise_problems(key, problems, len(rows), "Mend or remove these rows:")
    if config.overlong_examples == "error" and (refused := dropped.get("overlong")):
        named = [f"{one.where} (row {one.row_id}): {one.detail}" for one in refused]
        advice = "Raise data.max_example_tokens or set data.overlong_examples to drop or right:"
        raise_problems(key, named, len(rows), advice)
    report = LoadReport(len(rows), len(kept), {reason: tuple(found) for reason, found in dropped.items()}, tuple(cut))
    if not kept:
        raise DataError(f"{key}: no row is left to learn from: {report.summary()}. Raise data.max_example_tokens")
    return ExampleDataset(kept, report)


def _encode(row: SourceRow, config: DemonstrationDataConfig, tokenizer: PreTrainedTokenizerBase) -> Answer:
    """Ids and mask of the whole row. Raises AnswerCut where cutting it to the limit would leave no answer."""
    prompt = require_column(row, config.prompt_key, "data.prompt_key")
    text = None if config.response_key is None else require_column(row, config.response_key, "data.response_key")
    if text is not None and not isinstance(text, str):
        raise DataError(f"the answer in column {config.response_key!r} must be text, got {type(text).__name__}")
    made = supervise(tokenizer, prompt, config, answer=text)
    answer = answer_of(made.input_ids, made.labels_mask)
    start, limit = len(answer.prompt_ids), config.max_example_tokens
    if config.overlong_examples == "right" and start >= limit:
        raise AnswerCut(f"the answer begins at token {start}, beyond the limit of {limit}")
    return answer
