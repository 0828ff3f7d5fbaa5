"""What happens around the loop: validation, samples on disk, trackers, checkpoints, traces.

Each callback does one of them; their order matters only in that metrics are logged after they are complete and
saved state comes last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from verl.batch import Batch
from verl.common.background import Background
from verl.common.errors import CheckpointError, NotFinite
from verl.common.files import write_text
from verl.engines.packing import cut_by_tokens, kept_together, rows_of, unit_lengths
from verl.observe.health import HealthWatch
from verl.observe.history import METRICS_FILE, load_metrics
from verl.observe.trackers import TrackedRun, Trackers, open_trackers
from verl.trainer.output import json_lines
from verl.trainer.resume import check_room, holds_run, save
from verl.trainer.run_in_progress import RunInProgress
from verl.workers.trained import Critic, TrainedRole

log = logging.getLogger(__name__)


class Callback:
    """Called by the trainer at the start, after each step and at the end (also an interrupted one); does nothing."""

    def on_start(self, trainer: RunInProgress) -> None:
        """Before the first step of a ``run`` call."""

    def on_step(self, trainer: RunInProgress, batch: Batch, metrics: dict[str, float]) -> None:
        """After a step; may add to ``metrics``."""

    def on_end(self, trainer: RunInProgress) -> None:
        """When the ``run`` call ends, however it ends."""


def default_callbacks(sample_writers: Sequence[Callback] = ()) -> list[Callback]:
    """What the config asks for, in order; ``sample_writers`` keep samples of the steps."""
    return [SaveConfig(), Validate(), *sample_writers, Track(), WatchHealth(), SaveCheckpoints()]


class SaveConfig(Callback):
    """The effective config beside what it makes."""

    def on_start(self, trainer: RunInProgress) -> None:
        path = trainer.config.trainer.output_dir / "config.yaml"
        try:
            write_text(path, trainer.config.as_yaml())
        except OSError as error:
            raise CheckpointError(f"the config can't be written to {path}: {error}") from error


class Validate(Callback):
    """Measures on ``data.val`` at the start, on a schedule and at the end."""

    def on_start(self, trainer: RunInProgress) -> None:
        if trainer.config.validation.at_start and trainer.steps_done == 0:
            trainer.metrics = trainer.validate()

    def on_step(self, trainer: RunInProgress, batch: Batch, metrics: dict[str, float]) -> None:
        every = trainer.config.validation.every
        is_last = trainer.steps_done == trainer.last_step
        if is_last or (every is not None and trainer.steps_done % every == 0):
            metrics.update(trainer.validate())


class WriteRollouts(Callback):
    """Samples of a step with scores and log-probs, as ``rollouts/step_000001.jsonl``.

    every    steps between files; None: none
    rows_of  the batch and the number of its step -> the lines of a file
    At the start it drops those of later steps, as metrics.jsonl does: the run went back to an earlier checkpoint.
    """

    def __init__(self, every: int | None, rows_of: Callable[[Batch, int], list[dict[str, Any]]]) -> None:
        self.every, self.rows_of = every, rows_of

    def on_start(self, trainer: RunInProgress) -> None:
        for kind in ("rollouts", "validation"):
            for path in (trainer.config.trainer.output_dir / kind).glob("step_*.jsonl"):
                if path.name > run_file(trainer, kind).name:
                    path.unlink(missing_ok=True)

    def on_step(self, trainer: RunInProgress, batch: Batch, metrics: dict[str, float]) -> None:
        if self.every is not None and trainer.steps_done % self.every == 0:
            write_rows(run_file(trainer, "rollouts"), self.rows_of(batch, trainer.steps_done))


class Track(Callback):
    """Every step to metrics.jsonl and, as they want it, to the chosen trackers."""

    def __init__(self) -> None:
        self.trackers: Trackers | None = None

    def on_start(self, trainer: RunInProgress) -> None:
        self.trackers = open_trackers(
            TrackedRun(
                folder=trainer.config.trainer.output_dir,
                total_steps=trainer.last_step,
                track=trainer.config.track,
                resumed_step=trainer.steps_done if holds_run(trainer.config.trainer) else None,
                config=trainer.config.model_dump(mode="json"),
            )
        )
        if trainer.metrics and trainer.steps_done == 0:
            self.trackers.log(0, trainer.metrics)

    def on_step(self, trainer: RunInProgress, batch: Batch, metrics: dict[str, float]) -> None:
        assert self.trackers is not None
        self.trackers.log(trainer.steps_done, metrics)

    def on_end(self, trainer: RunInProgress) -> None:
        if self.trackers is not None:
            self.trackers.close()
        self.trackers = None


class WatchHealth(Callback):
    """Warns of a run that has stopped learning, and ends one whose updates have been left out too often in a row."""

    def __init__(self) -> None:
        self.watch = HealthWatch()

    def on_start(self, trainer: RunInProgress) -> None:
        self.watch = HealthWatch()
        path = trainer.config.trainer.output_dir / METRICS_FILE
        for line in load_metrics(path) if path.exists() else []:
            self.watch.look(int(line["step"]), line)

    def on_step(self, trainer: RunInProgress, batch: Batch, metrics: dict[str, float]) -> None:
        for sentence in self.watch.look(trainer.steps_done, metrics):
            log.warning(sentence)
        limit = trainer.config.trainer.max_skipped_in_a_row
        for role in trainer.parts.roles.trainable:
            if (skipped := metrics.get(f"{role.name}/skipped_in_a_row/max", 0.0)) >= limit:
                key = _key(role)
                raise NotFinite(
                    f"step {trainer.steps_done}: the last {skipped:.0f} updates of the {role.name} were left out: "
                    f"their loss or gradient was no finite number (trainer.max_skipped_in_a_row={limit}). The weights "
                    f"are those of the last update that was applied. Start again from a checkpoint with a lower "
                    f"{key}.optim.lr or {key}.optim.max_grad_norm, or with model.amp_dtype=float32"
                )


class SaveCheckpoints(Callback):
    """Saves on a schedule and whenever a run ends at a step that isn't saved yet, unless it broke within an update.

    One checkpoint at a time is written, beside the loop; a step or a run that ends tells what became of it. Weights
    that no longer give finite numbers are never saved: the newest checkpoint is one that a run can go on from.
    """

    def __init__(self) -> None:
        self.saved: int | None = None
        self._background = Background("verl-saves")
        self._learnt: Batch | None = None

    def on_start(self, trainer: RunInProgress) -> None:
        self.saved = trainer.steps_done
        check_room(trainer)

    def on_step(self, trainer: RunInProgress, batch: Batch, metrics: dict[str, float]) -> None:
        self._learnt = batch
        self._background.check()
        every = trainer.config.trainer.save_every
        if every is not None and trainer.steps_done % every == 0:
            if (problem := self._problem(trainer)) is not None:
                raise NotFinite(problem)
            self._save(trainer)

    def on_end(self, trainer: RunInProgress) -> None:
        try:
            self._background.wait()
        finally:  # what failed was an older step
            self._save_last(trainer)

    def _save_last(self, trainer: RunInProgress) -> None:
        if not trainer.is_whole:
            log.warning("step %d broke off within an update: nothing is saved of it", trainer.steps_done + 1)
        elif trainer.steps_done == self.saved and trainer.is_sound:
            return
        elif (problem := self._problem(trainer)) is not None:
            log.error(problem)
        else:
            self._save(trainer)
            self._background.wait()

    def _save(self, trainer: RunInProgress) -> None:
        save(trainer, self._background)
        self.saved = trainer.steps_done

    def _problem(self, trainer: RunInProgress) -> str | None:
        """What is wrong with the weights as they are, if the step that followed or a micro-batch of the last one's rows
        shows it."""
        for role in trainer.parts.roles.trainable:
            if trainer.is_sound and _gives_numbers(role, self._learnt):
                continue
            if not trainer.steps_done:
                path = trainer.config.model.path
                return (
                    f"the weights that the {role.name} starts with give numbers that aren't finite: those of "
                    f"{'model.scratch' if path is None else f'model.path={path!r}'} are damaged, or too large for "
                    f"model.amp_dtype={trainer.config.model.amp_dtype}"
                )
            key = _key(role)
            newest = f"the newest checkpoint is of step {self.saved}" if self.saved else "there is no checkpoint"
            if self.saved == trainer.steps_done:
                newest += ", and holds them: write the name of the one before into checkpoints/latest"
            return (
                f"after step {trainer.steps_done} the weights of the {role.name} give numbers that aren't finite, so "
                f"nothing is saved of them; {newest}. Lower {key}.optim.lr or {key}.optim.max_grad_norm, "
                "or set model.amp_dtype=float32"
            )
        return None


def _key(role: TrainedRole) -> str:
    """The section that configures ``role``: a reward model in training is what starts from ``model``, as an actor."""
    return "critic" if role.name == Critic.name else "actor"


def _gives_numbers(role: TrainedRole, batch: Batch | None) -> bool:
    """Whether what ``role`` infers of a micro-batch of these rows is finite."""
    if batch is None or not len(batch):
        return True
    units = kept_together(batch)
    bins = cut_by_tokens(unit_lengths(batch, units), role.config.max_tokens_per_micro_batch)
    probe = batch.select(rows_of(units, bins)[0])
    role.infer(probe)
    return bool(probe[role.writes].isfinite().all())


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    """Write JSON lines; a full disk costs the samples, not the run, and leaves no half of them."""
    try:
        write_text(path, "".join(json_lines(rows)))
    except OSError as error:
        log.warning("samples were not written to %s: %s", path, error)


def run_file(trainer: RunInProgress, kind: str) -> Path:
    """The file of the last whole step among those of ``kind``."""
    return trainer.config.trainer.output_dir / kind / f"step_{trainer.steps_done:06d}.jsonl"
