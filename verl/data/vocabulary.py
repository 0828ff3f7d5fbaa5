"""Text that a tokenizer has no token for: its unknown token comes in the place of it.

In: a tokenizer, text or ids. Out: an error or a warning. A tokenizer with an unknown token of its own belongs to a
model that has learned with it, which is worth a line. Where padding or the end of a text stands in, as in a
character-level one, no model can learn what it means: that is an error. Tokenizers without any never come to either.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from verl.common.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class UnknownText(DataError):
    """Text with ``pieces`` that the tokenizer ``name`` has no token for, and reads ``stand_in`` in place of."""

    def __init__(self, pieces: Sequence[str], name: str, stand_in: str) -> None:
        super().__init__(f"the tokenizer has no token for {_listed(pieces, 10)}")
        self.pieces, self.name, self.stand_in = tuple(pieces), name, stand_in


def check_known(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> None:
    """Raise UnknownText where ``ids``, those of ``text``, have a token of another meaning in place of a piece of it.

    Text that says that token itself, as a chat template may, is known. Only fast tokenizers tell where a token is from.
    """
    unknown = tokenizer.unk_token_id
    if unknown not in ids or not _stands_in(tokenizer):
        return
    spans = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)["offset_mapping"]
    found = [text[start:stop] for token, (start, stop) in zip(ids, spans, strict=True) if token == unknown]
    if pieces := [piece for piece in dict.fromkeys(found) if piece.strip() != tokenizer.unk_token]:
        raise UnknownText(pieces, tokenizer.name_or_path, tokenizer.unk_token)


def advice_on(errors: Sequence[UnknownText]) -> str:
    """What to do about rows with these errors, which are of one tokenizer: all their pieces at once."""
    pieces = list(dict.fromkeys(piece for error in errors for piece in error.pieces))
    one = errors[0]
    return (
        f"set model.tokenizer, now {one.name!r}, to one that knows {_listed(pieces, 100)} (it reads {one.stand_in!r} "
        "in their place)"
    )


def warn_of_unknown(
    tokenizer: PreTrainedTokenizerBase, key: str, rows: Iterable[tuple[int, str, Sequence[int]]]
) -> None:
    """One line that counts the rows with an unknown token of the tokenizer's own, and names the first.

    key   the configuration key that the rows came from
    rows  the row_id, the source and the ids of each
    """
    unknown = tokenizer.unk_token_id
    if unknown is None or _stands_in(tokenizer):
        return
    found = {row_id: (source, ids) for row_id, source, ids in rows if unknown in ids}
    if found:
        row_id, (source, ids) = next(iter(found.items()))
        log.warning(
            "%s: %d rows have text that the tokenizer %r doesn't know and reads as %r, such as row %d of %s: %d of its "
            "%d tokens",
            key,
            len(found),
            tokenizer.name_or_path,
            tokenizer.unk_token,
            row_id,
            source,
            list(ids).count(unknown),
            len(ids),
        )


def _stands_in(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the unknown token is one of another meaning, and the tokenizer tells what it read as it."""
    others = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    return tokenizer.unk_token_id in others and tokenizer.is_fast


def _listed(pieces: Sequence[str], most: int) -> str:
    more = f" and {len(pieces) - most} more" if len(pieces) > most else ""
    return ", ".join(map(repr, pieces[:most])) + more
