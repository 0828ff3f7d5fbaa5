"""Forwards that stand for a while where a module's own stand, and what trying one may raise. Knows no kind of layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import Tensor, nn

Forward: TypeAlias = Callable[..., Tensor]
Place: TypeAlias = tuple[dict[str, Any], str, object]
"""A namespace, a name in it, and what stands there for a while."""

OTHER_KIND = (RuntimeError, TypeError, ValueError, IndexError)
"""What a forward raises that takes other inputs than those we try."""
_ABSENT = object()


def forward_of(part: nn.Module, forward: Forward) -> Place:
    """``forward`` in the place of ``part``'s own; hooks of ``part`` go on as before."""
    return vars(part), "forward", forward


@contextmanager
def put(places: Sequence[Place]) -> Iterator[None]:
    """What ``places`` say, for the block; then what stood there before, or nothing."""
    before = [namespace.get(name, _ABSENT) for namespace, name, _ in places]
    try:
        for namespace, name, new in places:
            namespace[name] = new
        yield
    finally:
        for (namespace, name, _), old in zip(places, before, strict=True):
            if old is _ABSENT:
                namespace.pop(name, None)
            else:
                namespace[name] = old
