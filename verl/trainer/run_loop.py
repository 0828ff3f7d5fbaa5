"""What every run does around its steps: it starts, resumes, is interrupted, ends. What a step is, a trainer says.

In come a validated config, the parts made of it and a way to make one step; callbacks do the rest. Knows no algorithm.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from transformers.utils.logging import disable_progress_bar
from typing_extensions import Self

from verl.batch import Batch
from verl.common.errors import ConfigError, NotFinite, RunIncomplete, StaleWeights
from verl.observe.metrics import PhaseTimer
from verl.observe.profiler import ProfileConfig, StepProfiler
from verl.trainer.base_sections import Run as AnyRun
from verl.trainer.callbacks import Callback, default_callbacks
from verl.trainer.inputs import Given
from verl.trainer.interrupts import Interrupted, Interrupts
from verl.trainer.parts import RunParts
from verl.trainer.placement import serve_rank_0
from verl.trainer.resume import prepare_folder, restore
from verl.trainer.run_claim import RunClaim
from verl.workers.tracer import RemoteProfiler

log = logging.getLogger(__name__)

RunT = TypeVar("RunT", bound=AnyRun)
PartsT = TypeVar("PartsT", bound=RunParts)


@dataclass
class RunResult:
    """How a run ended: steps made in all, metrics of the last one, the signal's exit code if it was interrupted."""

    steps: int
    metrics: dict[str, float] = field(default_factory=dict)
    exit_code: int = 0


@dataclass(frozen=True)
class Made:
    """What came of a step.

    batch    the rows that it learned from
    metrics  of the step
    measure  seconds of each phase (`timing/<phase>_s`) -> further metrics
    """

    batch: Batch
    metrics: dict[str, float]
    measure: Callable[[dict[str, float]], dict[str, float]]


class RunLoop(ABC, Generic[RunT, PartsT]):
    """The frame of a trainer: it makes steps until there are enough, and can stop and go on at any of them."""

    Run: ClassVar[type[AnyRun]]
    """The sections of its runs."""
    config: RunT
    parts: PartsT

    @classmethod
    def from_config(cls, config: RunT, callbacks: list[Callback] | None = None) -> Self:
        """The trainer of an already validated config; under torchrun as the constructor.

        Raises ConfigError for a config of another family of algorithms.
        """
        if not isinstance(config, cls.Run):
            raise ConfigError(
                f"algorithm.name={config.algorithm.name!r} is of the family {config.family!r}, and {cls.__name__} is "
                f"for {cls.Run.family!r}: use the trainer of that family, or verl train, which picks it"
            )
        serve_rank_0()
        trainer = cls.__new__(cls)
        trainer._set_up(config, Given(), callbacks)
        return trainer

    @classmethod
    @abstractmethod
    def plan(cls, config: RunT) -> list[str]:
        """What ``config`` comes to, a line each: data and steps. Loads tokenizer and data, no model."""

    @abstractmethod
    def assemble(self, config: RunT, given: Given) -> PartsT:
        """The parts of the run. Raises ConfigError or DataError, the cheap errors before a model is loaded."""

    @abstractmethod
    def make_step(self, number: int, timer: PhaseTimer) -> Made:
        """Make step ``number``, from 1. Sets ``is_whole`` to False before it changes what a checkpoint holds."""

    @property
    @abstractmethod
    def batches_drawn(self) -> int:
        """Batches of training data that the whole steps have drawn."""

    def validate(self) -> dict[str, float]:
        """Metrics of the held-out rows as the weights are now; none without any."""
        return {}

    def sample_writers(self) -> list[Callback]:
        """Callbacks that keep samples of the steps."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the trainer itself."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state_dict`` gave."""

    def _set_up(self, config: RunT, given: Given, callbacks: list[Callback] | None) -> None:
        config = _at_one_place(config)
        prepare_folder(config.trainer)
        self.claim = RunClaim(config.trainer.output_dir)
        self.claim.take()
        self.config = config
        self.steps_done = 0
        disable_progress_bar()  # transformers' own bars would tear the run's
        self.parts = self.assemble(config, given)
        self.is_whole = self.is_sound = True
        self.metrics: dict[str, float] = {}
        self.interrupts = Interrupts()
        self.callbacks = default_callbacks(self.sample_writers()) if callbacks is None else callbacks
        self._asked = 0
        self._is_started = False
        self.profiler: StepProfiler | RemoteProfiler = StepProfiler(ProfileConfig(), config.trainer.output_dir, rank=0)
        try:
            restore(self)
        except BaseException:
            self.close()
            raise

    @property
    def last_step(self) -> int:
        """Where ``run`` stops: after the steps that it was asked for, else after those of the config.

        Epochs make at most as many steps as batches of data; fewer where steps drew several.
        """
        if steps := self._asked or self.config.trainer.total_steps:
            return steps
        one_epoch = math.ceil(len(self.parts.train) / self.config.trainer.rows_per_batch)
        batches = self.parts.loader.num_batches or one_epoch
        return batches if self.batches_drawn < batches else min(batches, self.steps_done)

    @property
    def total_steps(self) -> int:
        """Steps that the learning rate's schedule spans: the config's, or more where ``run`` was asked for more."""
        return max(self._asked, self.config.trainer.total_steps or self.parts.loader.num_batches or 0) or self.last_step

    def step(self) -> dict[str, float]:
        """One step of the loop. Returns its metrics. Raises RunIncomplete when the data have ended."""
        self._start()
        number, timer = self.steps_done + 1, PhaseTimer()
        with self.interrupts.protected():  # a signal waits for the end of the step, but for what make_step allows
            with self.profiler.step(number), timer.phase("step"):
                made = self._sound_step(number, timer)
                self.steps_done, self.is_whole = number, True
            timings = timer.result()
            peak = {"perf/peak_memory_bytes": float(self.parts.roles.peak_memory_bytes())}
            self.metrics = {**made.metrics, **timings, **made.measure(timings), **peak}
            for callback in self.callbacks:
                callback.on_step(self, made.batch, self.metrics)
        return self.metrics

    def run(self, num_steps: int | None = None) -> RunResult:
        """Train until ``num_steps`` more steps than all earlier calls asked for are made; steps of a resumed run count.

        Without ``num_steps``: until the config's total. A signal ends the run at once while nothing is half done, as
        when responses are sampled, else after the step, with a checkpoint. Raises RunIncomplete when the data end
        before the steps do.
        """
        if num_steps is not None:
            if not isinstance(num_steps, int) or num_steps < 1:
                raise ConfigError(f"num_steps must be a whole number, at least 1, got {num_steps!r}")
            self._asked += num_steps
        result = RunResult(self.steps_done)
        with self.interrupts.listening():
            try:
                self._start()
                if self.steps_done >= self.last_step:
                    log.info("nothing to do: the run is finished, %d of %d steps", self.steps_done, self.last_step)
                while self.steps_done < self.last_step:
                    self.step()
            except Interrupted as signal:
                log.warning("%s: stopping after step %d of %d", signal, self.steps_done, self.last_step)
                result.exit_code = signal.exit_code
            finally:
                with self.interrupts.ignored():
                    self._end()
        result.steps, result.metrics = self.steps_done, self.metrics
        return result

    def close(self) -> None:
        """Save what ``step`` made outside ``run``, end the trackers and the workers, give the model back.

        A program that ends without it leaves no worker behind either.
        """
        try:
            self._end()
        finally:
            self.parts.close()
            self.claim.release()

    def check_data(self) -> None:
        """Raise RunIncomplete when there is no batch for another step."""
        if self.parts.loader.ends_at(self.batches_drawn):
            raise RunIncomplete(
                f"the data end after step {self.steps_done} of {max(self.last_step, self.steps_done + 1)}: raise "
                "trainer.epochs, or leave it out so that prompts repeat until trainer.total_steps"
            )

    def _sound_step(self, number: int, timer: PhaseTimer) -> Made:
        try:
            return self.make_step(number, timer)
        except NotFinite:
            self.is_sound = False
            raise

    def _start(self) -> None:
        if not self.is_whole:
            raise StaleWeights(f"step {self.steps_done + 1} broke off within its update: start again from a checkpoint")
        if self._is_started:
            return
        self.claim.take()
        self._is_started = True
        roles, profile, folder = self.parts.roles, self.config.profile, self.config.trainer.output_dir / "traces"
        roles.take_model()
        if roles.groups:
            self.profiler = RemoteProfiler(roles.tracers, profile, self.last_step)
        else:
            self.profiler = StepProfiler(profile, folder, rank=0, total_steps=self.last_step)
        for callback in self.callbacks:
            callback.on_start(self)

    def _end(self) -> None:
        if not self._is_started:
            return
        self._is_started = False
        try:
            for callback in self.callbacks:
                callback.on_end(self)
        finally:
            self.claim.release()


def _at_one_place(config: RunT) -> RunT:
    """``config`` with an absolute ``trainer.output_dir``: a reward or a notebook may change the working folder."""
    trainer = config.trainer.model_copy(update={"output_dir": config.trainer.output_dir.absolute()})
    return config.model_copy(update={"trainer": trainer})
