"""The objects of one worker process: one of each role that shares it, whose methods run in turn.

Commands come in, replies go out; how they travel is the executor's matter.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from verl.common.collector import paused_collector
from verl.common.errors import VerlError, plain
from verl.controller.place import Place
from verl.controller.results import Result, Store


@dataclass(frozen=True)
class Create:
    """Make the object of a role: ``cls(place=place, **kwargs)``. The result holds cls and kwargs."""

    role: str
    place: Place
    cls_and_kwargs: Result


@dataclass(frozen=True)
class Invoke:
    """Run a method of a role's object. Arguments by position or name."""

    role: str
    method: str
    arguments: Mapping[str | int, Result]


Command = Create | Invoke


@dataclass(frozen=True)
class Reply:
    """What became of a command: a result, or the traceback of what it raised.

    refusal  what a constructor said of what it was given, in this library's own words
    """

    result: Result | None
    failure: str = ""
    refusal: VerlError | None = None


class Worker:
    """One object of each role. Used by one thread.

    store  puts results where others can load them from
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._roles: dict[str, Any] = {}

    def run(self, command: Command) -> Reply:
        """Carry out a command; what it raises is in the reply."""
        try:
            if isinstance(command, Create):
                self._create(command)
                return Reply(self._store(None))
            arguments = {key: result.load() for key, result in command.arguments.items()}
            positional = [arguments[key] for key in sorted(key for key in arguments if isinstance(key, int))]
            named = {key: value for key, value in arguments.items() if isinstance(key, str)}
            return Reply(self._store(getattr(self._roles[command.role], command.method)(*positional, **named)))
        except Exception as error:  # user code: the caller gets its traceback
            refusal = None
            if isinstance(command, Create) and isinstance(error, VerlError):
                refusal = plain(error, f"{command.role} worker, rank {command.place.rank}")
            return Reply(None, traceback.format_exc(), refusal)

    def _create(self, command: Create) -> None:
        if command.place.device.startswith("cuda"):
            import torch

            torch.cuda.set_device(command.place.device)
        with paused_collector():  # it imports what the role needs
            cls, kwargs = command.cls_and_kwargs.load()
        place = replace(command.place, colocated=self._roles)
        self._roles[command.role] = cls(place=place, **kwargs)
