"""Where the metrics of a step go: a step and its numbers come in, files, screens and services get them.

``open_trackers`` opens what the configuration names, with ``metrics.jsonl`` always among it. A tracker that fails
while the run goes on is named in a warning and never stops the training. Knows nothing of what the keys mean.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import Field, field_validator

from verl.common.errors import ConfigError, MissingExtra, UnknownName, VerlError
from verl.common.files import write_text
from verl.common.registry import Registry
from verl.common.section import Section
from verl.observe.history import METRICS_FILE, JsonlTracker
from verl.observe.keys import VALIDATION

_log = logging.getLogger(__name__)

TRACKERS = Registry(
    "tracker",
    {
        "console": "verl.observe.console:ConsoleTracker",
        "tensorboard": "verl.observe.trackers:TensorBoardTracker",
        "wandb": "verl.observe.trackers:WandbTracker",
    },
)
_NEEDS_PACKAGE = {"tensorboard": "tensorboard", "wandb": "wandb"}


class TrackConfig(Section):
    """Who is told of the metrics."""

    formerly: ClassVar[dict[str, str]] = {
        "run_name": "a run has the name of its folder, trainer.output_dir",
        "project": "set the environment variable WANDB_PROJECT",
    }

    trackers: list[str] = ["console"]
    """Any of ``console``, ``tensorboard``, ``wandb`` (the last two need the extra ``track``); ``metrics.jsonl`` is
    always written."""
    log_interval: int = Field(1, ge=1)
    """Steps from one line to the next in the trackers above; ``metrics.jsonl`` gets every step, and a validation is
    always told."""

    @field_validator("trackers")
    @classmethod
    def _known(cls, names: list[str]) -> list[str]:
        for name in names:
            if name == "jsonl":
                raise ConfigError(f"trackers: {METRICS_FILE} is always written; leave 'jsonl' out of the list")
            if name not in TRACKERS:
                raise UnknownName("tracker", name, TRACKERS)
        return list(dict.fromkeys(names))

    def check_installed(self) -> None:
        """Raise MissingExtra for a tracker whose package is absent; call it before a model is loaded."""
        for name in self.trackers:
            package = _NEEDS_PACKAGE.get(name)
            if package and find_spec(package) is None:
                raise MissingExtra(package, "track", f"tracker {name!r}")


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker is told of the run when it is opened.

    folder        the run's folder
    total_steps   steps that the run will have when it ends
    resumed_step  None for a fresh run, else the last step that the checkpoint holds
    config        the effective configuration, as plain values
    """

    folder: Path
    total_steps: int
    track: TrackConfig
    resumed_step: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    def is_due(self, step: int) -> bool:
        """Whether ``log_interval`` lets ``step`` through; the last step always passes."""
        return step % self.track.log_interval == 0 or step == self.total_steps

    def due_part(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """What of a step's metrics is told: all of it when due, else the validation's alone."""
        is_due = self.is_due(step)
        return {key: value for key, value in metrics.items() if is_due or key.startswith(VALIDATION)}


class Tracker(Protocol):
    """Told of every step once, in order. Built from a TrackedRun; thins by ``log_interval`` itself."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the numbers of one step."""
        ...

    def close(self) -> None:
        """Hand on what is still held back; no ``log`` comes after it."""
        ...


class Trackers:
    """Several trackers as one, where the failure of one reaches neither the others nor the training.

    The first failure of each is a warning with its cause; it is tried again at every step, and ``close`` says how
    many steps it missed.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)
        self._missed: dict[str, int] = {}

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell every tracker of ``step``."""
        for name, tracker in self._trackers.items():
            try:
                tracker.log(step, metrics)
            except Exception as error:  # a full disk or a dead network must not end a run of days
                if name not in self._missed:
                    _log.warning("tracker %r failed at step %d, training goes on without it: %r", name, step, error)
                self._missed[name] = self._missed.get(name, 0) + 1

    def close(self) -> None:
        """Close every tracker, also after one fails; a second call does nothing."""
        trackers, self._trackers = self._trackers, {}
        for name, tracker in trackers.items():
            try:
                tracker.close()
            except Exception as error:  # as above
                _log.warning("tracker %r failed to close: %r", name, error)
        for name, steps in self._missed.items():
            _log.warning("tracker %r missed %d steps in all", name, steps)
        self._missed = {}


def open_trackers(run: TrackedRun) -> Trackers:
    """``metrics.jsonl`` and every tracker that ``run.track`` names.

    On a fresh run whatever fails here raises: somebody is watching, and nothing is lost. On a resumed one a service
    that can't be reached is a warning, so that a restart at night goes through; a missing package raises all the same.
    """
    run.track.check_installed()
    opened: dict[str, Tracker] = {"jsonl": JsonlTracker(run.folder / METRICS_FILE, run.resumed_step)}
    try:
        for name in run.track.trackers:
            try:
                opened[name] = TRACKERS.load(name)(run)
            except VerlError:
                raise
            except Exception as error:  # services raise what they like
                if run.resumed_step is None:
                    raise
                _log.warning("tracker %r can't be opened, training goes on without it: %r", name, error)
    except BaseException:
        Trackers(opened).close()
        raise
    return Trackers(opened)


class TensorBoardTracker:
    """Event files in ``<run>/tensorboard/``; a resumed run hides the steps that it makes again."""

    def __init__(self, run: TrackedRun) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra("tensorboard", "track", "tracker 'tensorboard'") from error
        self._run = run
        purge = None if run.resumed_step is None else run.resumed_step + 1
        self._writer: Any = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a scalar a key."""
        for key, value in self._run.due_part(step, metrics).items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Write out and close the event file."""
        self._writer.close()


class WandbTracker:
    """A wandb run in ``<run>/wandb/``. Its id is kept in ``<run>/wandb_id.txt``: a resumed run goes on there.

    It is in the project that the environment variable ``WANDB_PROJECT`` names, else in ``verl``.
    """

    def __init__(self, run: TrackedRun) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtra("wandb", "track", "tracker 'wandb'") from error
        self._run = run
        id_file = run.folder / "wandb_id.txt"
        is_known = run.resumed_step is not None and id_file.is_file()
        run.folder.mkdir(parents=True, exist_ok=True)
        self._wandb: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "verl"),
            name=run.folder.resolve().name,
            dir=str(run.folder),
            config=dict(run.config),
            id=id_file.read_text(encoding="utf-8").strip() if is_known else None,
            resume="allow",
        )
        if not is_known:
            write_text(id_file, self._wandb.id + "\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the step's numbers; wandb drops steps that it has already."""
        part = self._run.due_part(step, metrics)
        if part:
            self._wandb.log(part, step=step)

    def close(self) -> None:
        """Wait until all is sent."""
        self._wandb.finish()
