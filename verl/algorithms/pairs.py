"""The rows of pairs: which row of a micro-batch is compared with which.

Knows ``pair_id`` and ``is_chosen``; not what is compared.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verl.batch import FIELDS
from verl.common.errors import MissingField, ShapeError


def pair_rows(columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """[P] and [P] int64: the chosen and the rejected row of each pair, in rising order of ``pair_id``.

    columns  pair_id [B] int64, is_chosen [B] bool, of whole pairs in any order
    Raises MissingField naming who writes a column, ShapeError for a row without its partner.
    """
    for name in ("pair_id", "is_chosen"):
        if name not in columns:
            raise MissingField(f"a loss of pairs needs column {name!r}: {FIELDS[name].written_by} writes it")
    pair_id, is_chosen = columns["pair_id"], columns["is_chosen"].bool()
    sides = [rows[pair_id[rows].argsort(stable=True)] for rows in (_where(is_chosen), _where(~is_chosen))]
    chosen, rejected = sides
    if not torch.equal(pair_id[chosen], pair_id[rejected]) or len(pair_id[chosen].unique()) != len(chosen):
        raise ShapeError(
            f"pairs are one chosen and one rejected row each; pair_id is {pair_id.tolist()}, "
            f"is_chosen {is_chosen.tolist()}"
        )
    return chosen, rejected


def _where(mask: Tensor) -> Tensor:
    return mask.nonzero()[:, 0]
