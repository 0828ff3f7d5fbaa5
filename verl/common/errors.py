"""The errors this library raises on purpose.

    VerlError
      ConfigError (ValueError)      a key, a value or a combination the user can change
        UnknownName                 a name that no registry entry has
      DataError (ValueError)        a file or a row that can't be used
      ShapeError (ValueError)       tensors whose shapes disagree
      MissingField (KeyError)       a batch column that nobody wrote
      LayoutError (ValueError)      shards that don't make the tensor they say they make
      MissingExtra (ImportError)    an optional package that isn't installed
      UnsupportedModel (ValueError) a model this library can't run right
      CheckpointError               a checkpoint that is incomplete or doesn't fit the run
      RewardError                   rewards failed so widely that training would be wasted
      StaleWeights                  a rollout would run on other weights than it says
      NotFinite                     weights, losses or gradients that are no numbers any more
      RunIncomplete                 a run that made fewer steps than it was asked for
      WorkerError                   a worker died: carries role, rank and its traceback

A message says what is wrong, what was given, what is allowed and which key to change.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class VerlError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(VerlError, ValueError):
    """A key, a value or a combination of keys that the user can change."""


class UnknownName(ConfigError):
    """A name that a registry doesn't hold."""

    def __init__(self, kind: str, name: object, known: Iterable[str]) -> None:
        names = sorted(known)
        hint = did_you_mean(str(name), names) or "."
        super().__init__(f"unknown {kind} {name!r}{hint} Known: {', '.join(names)}")


class DataError(VerlError, ValueError):
    """A data file or row that can't be used."""


class ShapeError(VerlError, ValueError):
    """Tensors whose shapes or lengths disagree."""


class MissingField(VerlError, KeyError):
    """A batch column that is read before anybody wrote it."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class LayoutError(VerlError, ValueError):
    """Shards that don't make up the tensor they claim to."""


class MissingExtra(VerlError, ImportError):
    """An optional package that isn't installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {package!r}: pip install 'verl[{extra}]'")


class UnsupportedModel(VerlError, ValueError):
    """A model that would run, but not right."""


class CheckpointError(VerlError):
    """A checkpoint that is incomplete or doesn't fit the run."""


class RewardError(VerlError):
    """Rewards failed so widely that going on would waste the run."""


class StaleWeights(VerlError):
    """A rollout would run on other weights than its version says."""


class NotFinite(VerlError):
    """Weights, losses or gradients that are no finite numbers, so that going on would learn nothing."""


class RunIncomplete(VerlError):
    """A run ended before the number of steps it was asked for."""


class WorkerError(VerlError):
    """A worker raised or died; the text carries role, rank and the remote traceback."""

    def __init__(self, role: str, rank: int, detail: str) -> None:
        super().__init__(f"{role} worker, rank {rank}: {detail}")
        self.role, self.rank = role, rank


def plain(error: VerlError, where: str) -> VerlError:
    """``error`` as one of the kinds that take a message alone, which any process can unpickle; its text ends with
    ``where`` it was raised."""
    kinds = (ConfigError, DataError, UnsupportedModel, CheckpointError)
    kind = next((kind for kind in kinds if isinstance(error, kind)), VerlError)
    return kind(f"{error} ({where})")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the nearest of ``known``, or an empty string.

    Of equally near ones that of the same letters wins: two of them changed places.
    """
    near = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)
    match = next((other for other in near if sorted(other) == sorted(word)), near[0] if near else None)
    return f"; did you mean {match!r}?" if match else ""
