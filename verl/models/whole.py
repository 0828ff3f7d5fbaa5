"""Weights from a folder or the hub, none of which may be missing: transformers would draw those at random."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from transformers import PreTrainedModel

from verl.common.errors import DataError

_SHOWN = 3


def load_whole(kind: Any, place: str, *, given: Collection[str] = (), **keywords: Any) -> PreTrainedModel:
    """``kind.from_pretrained(place, **keywords)``, with all its weights. Those that are tied to others needn't be
    there, and what is there besides doesn't matter.

    kind   a class of transformers', such as AutoModelForCausalLM
    given  names of weights that come from elsewhere
    Raises DataError naming the first ones that are missing and how many, and what transformers raises.
    """
    model, info = kind.from_pretrained(place, output_loading_info=True, **keywords)
    if missing := sorted({*info["missing_keys"]} - {*given}):
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise DataError(
            f"the weights in {place!r} lack {', '.join(missing[:_SHOWN])}{more}, which would be random in a "
            f"{type(model).__name__}"
        )
    loaded: PreTrainedModel = model
    return loaded
