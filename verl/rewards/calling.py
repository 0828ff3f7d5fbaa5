"""A user's function in, a function of one dict out, which passes on only the arguments that the user named.

Also loads functions from a module or a file. Knows nothing of processes.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import linecache
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.common.errors import ConfigError

OWN_FIELDS = ("prompt", "response", "ground_truth")
Call = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Bound:
    """A user's function as a function of the fields of one item.

    needs  fields that it can't be called without, by name
    """

    call: Call
    needs: frozenset[str] = frozenset()

    def __call__(self, fields: Mapping[str, Any]) -> Any:
        return self.call(fields)


@dataclass(frozen=True)
class FileFunction:
    """A function of a Python file. The text is read once, so that a worker started later runs the same code."""

    path: str
    name: str
    text: str

    def load(self) -> Any:
        """Run the file as a module and return its function. The file's folder is importable from it."""
        module = ModuleType(f"_reward_file_{Path(self.path).stem}")
        module.__file__ = self.path
        sys.modules[module.__name__] = module
        if (folder := str(Path(self.path).parent)) not in sys.path:
            sys.path.append(folder)
        linecache.cache[self.path] = (len(self.text), None, self.text.splitlines(True), self.path)
        exec(compile(self.text, self.path, "exec"), module.__dict__)
        return _attribute(module, self.name)


@dataclass(frozen=True)
class ModuleFunction:
    """A function of an importable module."""

    module: str
    name: str

    def load(self) -> Any:
        """Import the module and return its function."""
        return _attribute(importlib.import_module(self.module), self.name)


def find(spec: str) -> FileFunction | ModuleFunction:
    """``"path/to/file.py:function"`` or ``"package.module:function"``, without running it.

    Raises ConfigError when it has another form or the file isn't there.
    """
    where, colon, name = spec.rpartition(":")
    if not (colon and where and name.isidentifier()):
        raise ConfigError(
            f"key 'function' must be 'path/to/file.py:function' or 'package.module:function', got {spec!r}"
        )
    if not where.endswith(".py"):
        return ModuleFunction(where, name)
    path = Path(where).expanduser().absolute()
    if not path.is_file():
        raise ConfigError(f"key 'function' is {spec!r}, but there is no file {path}")
    return FileFunction(str(path), name, path.read_text(encoding="utf-8"))


def bind(function: Any, kwargs: Mapping[str, Any]) -> Bound:
    """A function of the fields of one item, which calls ``function`` with those that it names, and with ``kwargs``.

    ``**row`` receives everything. Three parameters of other names are passed prompt, response, ground_truth in that
    order. A class is made once, with ``kwargs``, and then called. A coroutine is run to its end.
    Raises ConfigError when ``function`` can't be called or doesn't take a key of ``kwargs``.
    """
    if inspect.isclass(function):
        _check_makes(function, kwargs)
        return bind(function(**kwargs), {})
    if not callable(function):
        raise ConfigError(f"a reward must be callable, got {type(function).__name__}")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # some functions written in C
        return Bound(lambda fields: _finish(function(*(fields[name] for name in OWN_FIELDS), **kwargs)))
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if not takes_all and (unknown := sorted(set(kwargs) - set(named))):
        raise ConfigError(f"reward.kwargs names {unknown}, which the reward doesn't take; it takes {named}")
    if not takes_all and _is_positional(parameters, kwargs):
        return Bound(lambda fields: _finish(function(*(fields[name] for name in OWN_FIELDS), **kwargs)))
    required = [p.name for p in parameters if p.name in named and p.default is p.empty]

    def call(fields: Mapping[str, Any]) -> Any:
        given = {**fields, **kwargs}
        if missing := [name for name in required if name not in given]:
            raise TypeError(f"the reward needs {missing}, but the row has only {sorted(given)}")
        return _finish(function(**(given if takes_all else {n: given[n] for n in named if n in given})))

    return Bound(call, frozenset(required) - kwargs.keys())


def describe(error: BaseException) -> str:
    """An exception in one line, its type first, with the place in the user's code that raised it."""
    try:
        said = " ".join(str(error).split())
    except Exception:  # a user's class
        said = "its message can't be made"
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text


def _is_positional(parameters: list[inspect.Parameter], kwargs: Mapping[str, Any]) -> bool:
    """Whether prompt, response and ground_truth go by position: ``f(p, r, g)``, ``f(*args)``."""
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        return True
    if not {p.name for p in parameters}.isdisjoint(OWN_FIELDS):
        return False
    open_ones = [p for p in parameters if p.default is p.empty and p.name not in kwargs]
    return any(p.kind is p.VAR_POSITIONAL for p in parameters) or (len(open_ones) == 3 and open_ones == parameters[:3])


def _check_makes(kind: type, kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError where the class ``kind`` can't be made with ``kwargs``."""
    try:
        signature = inspect.signature(kind)
    except ValueError:  # some classes written in C
        return
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        raise ConfigError(
            f"the reward's class {kind.__name__}{signature} can't be made with reward.kwargs={dict(kwargs)!r}: {error}"
        ) from error


def _finish(value: Any) -> Any:
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _attribute(module: ModuleType, name: str) -> Any:
    if not hasattr(module, name):
        known = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ConfigError(f"{module.__file__ or module.__name__} has no {name!r}; it has {known}")
    return getattr(module, name)
