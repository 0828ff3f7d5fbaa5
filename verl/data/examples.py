"""Answers to learn from as they are: token ids, which of them count, and their batch.

An example is what a loss looks at as one: a single answer, or the chosen and the rejected one of a pair. Knows nothing
of files, templates or losses.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, overload

import torch

from verl.batch import Batch
from verl.common.errors import DataError
from verl.data.gathering import Incident, LoadReport


@dataclass(frozen=True)
class Answer:
    """One response to one prompt, as the model reads them.

    response_mask  as long as ``response_ids``: True at the tokens that count (the others are read, not learned)
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    def first_tokens(self, limit: int) -> Answer:
        """The answer without what stands beyond ``limit`` tokens of prompt and response; the prompt stays whole."""
        rest = max(0, limit - len(self.prompt_ids))
        return Answer(self.prompt_ids, self.response_ids[:rest], self.response_mask[:rest])

    @cached_property
    def key(self) -> bytes:
        """16 bytes that tell it from every other answer by its ids."""
        return answer_key(self.prompt_ids, self.response_ids)


@dataclass(frozen=True)
class Example:
    """What a loss looks at as one.

    row_id      index of its row among all rows of all sources
    answers     one, or two of a pair
    is_chosen   for each answer: whether it is the better one of its pair or, alone, a desirable one
    source      the file or data set it came from
    mismatched  its prompt with an answer to another one, for losses that estimate a KL from such
    """

    row_id: int
    answers: tuple[Answer, ...]
    is_chosen: tuple[bool, ...]
    source: str
    mismatched: Answer | None = None

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Of its first answer; those of a pair have the same."""
        return self.answers[0].prompt_ids

    @property
    def ids(self) -> tuple[int, ...]:
        """Those of every answer and its prompt, one after the other."""
        return tuple(token for answer in self.answers for token in answer.prompt_ids + answer.response_ids)

    def __len__(self) -> int:
        return sum(len(answer) for answer in self.answers)


class ExampleDataset(Sequence[Example]):
    """Examples in the order of their sources, and the report of how they were loaded."""

    def __init__(self, examples: Sequence[Example], report: LoadReport) -> None:
        self._examples = tuple(examples)
        self.report = report

    def __len__(self) -> int:
        return len(self._examples)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Example, ...]: ...
    def __getitem__(self, index: int | slice) -> Example | tuple[Example, ...]:
        return self._examples[index]

    def without_prompts(self, held_out: ExampleDataset) -> ExampleDataset:
        """These examples less those whose prompt is one of ``held_out``. Raises DataError when nothing is left."""
        taken = {example.prompt_ids for example in held_out}
        kept = [example for example in self if example.prompt_ids not in taken]
        if not kept:
            raise DataError(f"all {len(self)} examples of data.train are to prompts of data.val too (data.exclude_val)")
        out = tuple(
            Incident(example.row_id, f"row {example.row_id} of {example.source}", "its prompt is in data.val")
            for example in self
            if example.prompt_ids in taken
        )
        dropped = {**self.report.dropped, "also in data.val": out} if out else self.report.dropped
        return ExampleDataset(kept, replace(self.report, rows_kept=len(kept), dropped=dropped))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all examples: a resumed run has the same one, or it isn't on the same data."""
        digest = hashlib.sha256()
        for example in self._examples:
            digest.update(repr((example.row_id, example.is_chosen)).encode())
            for answer in example.answers:
                digest.update(answer.key)
        return digest.hexdigest()[:16]


def answer_key(prompt_ids: Iterable[int], response_ids: Iterable[int]) -> bytes:
    """16 bytes that tell a prompt and its response from every other pair of ids."""
    prompt, response = array("q", prompt_ids), array("q", response_ids)
    head = len(prompt).to_bytes(8, "little")
    return hashlib.blake2b(head + prompt.tobytes() + response.tobytes(), digest_size=16).digest()


def collate(examples: Sequence[Example]) -> Batch:
    """The answers of ``examples`` as rows, those of one example next to each other.

    Columns: prompt_ids, response_ids, response_mask, row_id, is_chosen and, where an example has several answers, the
    pair_id that they share. Each row's mapping holds its ``example``.
    """
    is_paired = any(len(example.answers) > 1 for example in examples)
    rows = [(place, example, i) for place, example in enumerate(examples) for i in range(len(example.answers))]
    batch = answers_batch(
        [example.answers[i] for _, example, i in rows], [{"example": example} for _, example, _ in rows]
    )
    batch.put("row_id", torch.tensor([example.row_id for _, example, _ in rows], dtype=torch.int64))
    batch.put("is_chosen", torch.tensor([example.is_chosen[i] for _, example, i in rows], dtype=torch.bool))
    if is_paired:
        batch.put("pair_id", torch.tensor([place for place, _, _ in rows], dtype=torch.int64))
    return batch


def answers_batch(answers: Sequence[Answer], rows: Sequence[Mapping[str, Any]] | None = None) -> Batch:
    """``answers`` as rows of prompt_ids, response_ids and response_mask."""
    batch = Batch(rows or [{}] * len(answers))
    for name, dtype in (("prompt_ids", torch.int64), ("response_ids", torch.int64), ("response_mask", torch.bool)):
        values = [getattr(answer, name) for answer in answers]
        flat = torch.tensor([x for value in values for x in value], dtype=dtype)
        batch.put(name, flat, [len(value) for value in values])
    return batch


def answer_of(input_ids: Sequence[int], labels_mask: Sequence[bool]) -> Answer:
    """An example of ``supervision.py`` as prompt and response: the response begins at the first token that counts."""
    first = list(labels_mask).index(True)
    return Answer(tuple(input_ids[:first]), tuple(input_ids[first:]), tuple(labels_mask[first:]))
