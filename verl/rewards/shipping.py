"""A callable in, bytes that a fresh interpreter can load it from out; None where that can't be or shouldn't be.

Functions of the user's script, lambdas and closures travel by value; functions of importable modules by name.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle


@dataclass(frozen=True)
class Given:
    """A callable that was passed in Python, in the form that workers load."""

    function: Callable[..., Any]

    def load(self) -> Callable[..., Any]:
        """The callable itself."""
        return self.function


def ship(source: object) -> bytes | str:
    """``source`` pickled for a worker, or, as text, why it has to stay in this process."""
    module = _home_outside_reach(source.function) if isinstance(source, Given) else None
    by_value = module is not None and module.__name__ not in cloudpickle.list_registry_pickle_by_value()
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        file = io.BytesIO()
        _Pickler(file).dump(source)
        return file.getvalue()
    except Exception as error:  # whatever a user's object raises when it is pickled
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Refuses models and what is on a GPU: a copy a worker would fill the memory."""

    def persistent_id(self, thing: Any) -> None:
        torch = sys.modules.get("torch")
        if torch is None:
            return
        if isinstance(thing, torch.nn.Module):
            raise pickle.PicklingError(f"it holds a model ({type(thing).__name__})")
        if isinstance(thing, torch.Tensor) and thing.device.type != "cpu":
            raise pickle.PicklingError(f"it holds a tensor on {thing.device}")


def _home_outside_reach(function: Any) -> Any:
    """The module that defines ``function``, if a fresh interpreter with our import path wouldn't find it."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    name = getattr(function, "__module__", None) or type(function).__module__
    module = sys.modules.get(name)
    if module is None or name == "__main__" or _is_found(name, getattr(module, "__file__", None)):
        return None
    return module


def _is_found(name: str, file: str | None) -> bool:
    """Whether importing ``name`` afresh would run ``file`` (a built-in module has none)."""
    package = name.rpartition(".")[0]
    path = getattr(sys.modules.get(package), "__path__", None) if package else None
    specs = (finder.find_spec(name, path) for finder in sys.meta_path)
    spec = next((spec for spec in specs if spec is not None), None)
    return spec is not None and file in (None, spec.origin)
