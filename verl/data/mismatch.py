"""Which answer a prompt is to meet that isn't one of its own: a partner from the whole data set, the same all run long.

Partners aren't taken from a step's batch: then a batch of one row had none, and a small one had few to choose from.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import replace

from verl.common.errors import DataError
from verl.common.seeding import derive_seed
from verl.data.examples import Answer, ExampleDataset


def partners(prompts: Sequence[Hashable], seed: int) -> list[int]:
    """For each row the index of a row with another prompt; equal prompts are the same prompt.

    Every row is a partner once where that can be: where no prompt has more than half of the rows. Rows of a prompt that
    has more share the others in turn. Raises DataError when all prompts are equal.
    """
    groups: dict[Hashable, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(row)
    if len(groups) < 2:
        raise DataError(
            f"KTO's KL estimate needs answers to other prompts, and all {len(prompts)} rows have the same prompt: add "
            "rows with another one"
        )
    draw = random.Random(derive_seed("mismatch", seed))
    shuffled = list(groups.values())
    for rows in shuffled:
        draw.shuffle(rows)
    draw.shuffle(shuffled)
    order = [row for rows in shuffled for row in rows]
    largest = max(shuffled, key=len)
    found = [0] * len(prompts)
    if 2 * len(largest) <= len(order):  # a turn by the largest group leaves every group
        for place, row in enumerate(order):
            found[row] = order[(place + len(largest)) % len(order)]
        return found
    others = [row for rows in shuffled if rows is not largest for row in rows]
    for place, row in enumerate(largest):
        found[row] = others[place % len(others)]
    for place, row in enumerate(others):
        found[row] = largest[place]
    return found


def with_mismatches(examples: ExampleDataset, seed: int, max_tokens: int) -> ExampleDataset:
    """``examples`` whose ``mismatched`` is their own prompt with the first answer of their partner.

    A long prompt may meet a long answer: what is beyond ``max_tokens``, the limit of an example, is cut.
    """
    of = partners([example.prompt_ids for example in examples], seed)
    made = []
    for example, partner in zip(examples, of, strict=True):
        other = examples[partner].answers[0]
        mismatched = Answer(example.prompt_ids, other.response_ids, other.response_mask)
        made.append(replace(example, mismatched=mismatched.first_tokens(max_tokens)))
    return ExampleDataset(made, examples.report)
