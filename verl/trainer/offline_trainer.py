"""The loop over answers that are there already: draw, infer, learn. Preference, SFT and reward-model trainers are thin
over it: they say what an example is.

``OfflineTrainer.make_step`` is the algorithm; ``run_loop.py`` starts it, resumes it and ends it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

from verl.batch import Batch
from verl.data.examples import ExampleDataset, collate
from verl.observe.metrics import VALIDATION, PhaseTimer
from verl.trainer.callbacks import Callback
from verl.trainer.inputs import Given, given_sections
from verl.trainer.measures import describe_answers, training_speed
from verl.trainer.offline_assembly import OfflineParts, answers_in, assemble_offline, load_offline_inputs
from verl.trainer.offline_sections import OfflineRun
from verl.trainer.placement import serve_rank_0
from verl.trainer.run_loop import Made, RunLoop

OfflineRunT = TypeVar("OfflineRunT", bound=OfflineRun)


class OfflineTrainer(RunLoop[OfflineRunT, OfflineParts]):
    """A trainer whose steps learn from the next examples of a data set.

    model      folder or hub name, a transformers module, or the keys of the ``model`` section
    data       file, folder, list of mappings, ``datasets.Dataset``, or the keys of the ``data`` section
    tokenizer  a tokenizer or where to load it from; default: beside the model
    val        held-out rows, as ``data``
    algorithm  name or keys of the ``algorithm`` section; default: the first of the family
    callbacks  instead of those that the config asks for (``default_callbacks``), which also write metrics and save
    sections   actor, validation, trainer, track, profile: keys as in a YAML config

    Under torchrun ranks other than 0 serve in the constructor and leave with SystemExit(0), as in ``PPOTrainer``.

    Raises ConfigError or DataError for anything wrong before a model is loaded, where it can be known by then.
    """

    Run: ClassVar[type[OfflineRun]]
    """The sections of its runs."""
    default_algorithm: ClassVar[str]

    def __init__(
        self,
        model: Any,
        data: Any,
        *,
        tokenizer: Any = None,
        val: Any = None,
        algorithm: str | Mapping[str, Any] | None = None,
        callbacks: list[Callback] | None = None,
        **sections: Any,
    ) -> None:
        serve_rank_0()
        keys, given = given_sections(model, tokenizer, data, val)
        run = self.Run.parse(
            {**keys, "algorithm": self.default_algorithm if algorithm is None else algorithm, **sections}
        )
        self._set_up(cast(OfflineRunT, run), given, callbacks)

    @classmethod
    @abstractmethod
    def load(cls, config: OfflineRunT, source: Any, tokenizer: Any, key: str, max_rows: int | None) -> ExampleDataset:
        """The examples of ``source``.

        key       the configuration key that it came from, for messages
        max_rows  use only the first so many rows
        """

    @classmethod
    def plan(cls, config: OfflineRunT) -> list[str]:
        """As in RunLoop."""
        inputs = load_offline_inputs(config, Given(), partial(cls.load, config))
        trainer = config.trainer
        steps = trainer.total_steps or -(-len(inputs.train) * (trainer.epochs or 1) // trainer.rows_per_step)
        lines = [f"train: {inputs.train.report.summary()}"]
        if inputs.val is not None:
            lines.append(f"val: {inputs.val.report.summary()}")
        return [*lines, f"steps: {steps} of {trainer.rows_per_step} examples"]

    def assemble(self, config: OfflineRunT, given: Given) -> OfflineParts:
        """As in RunLoop; what must be computed before the first update is."""
        parts = assemble_offline(config, given, partial(type(self).load, config))
        if parts.starting_policy is None:
            return parts
        with ExitStack() as undo:
            undo.callback(parts.close)
            parts.roles.take_model()
            steps = config.trainer.total_steps or parts.loader.num_batches or len(parts.train)
            parts.starting_policy.prepare(answers_in(parts, steps))
            parts.roles.give_model_back()
            undo.pop_all()
        return parts

    @property
    def batches_drawn(self) -> int:
        """One a step."""
        return self.steps_done

    def make_step(self, number: int, timer: PhaseTimer) -> Made:
        """As in RunLoop: one step of the algorithm."""
        parts = self.parts
        with self.interrupts.allowed():  # a signal ends at once what can be thrown away
            self.check_data()
            if number == 1 and parts.starting_policy is not None:
                parts.starting_policy.prepare(answers_in(parts, self.last_step))
            batch = self._batch(number)
            for role in parts.passes:
                with timer.phase(role.writes):
                    role.infer(batch)
        self.is_whole = False
        metrics: dict[str, float] = {}
        for trained in parts.trained:
            with timer.phase(f"update_{trained.name}"):
                metrics |= trained.update(batch, step=number, total_steps=self.total_steps).result()
        return Made(batch, metrics | parts.algorithm.derived(metrics), partial(self._measure, batch))

    def validate(self) -> dict[str, float]:
        """The loss's metrics on all of ``data.val`` at once."""
        parts = self.parts
        if parts.val is None:
            return {}
        batch = collate(parts.val)
        for role in parts.passes:
            role.infer(batch)
        metrics: dict[str, float] = {}
        for trained in parts.trained:
            metrics |= trained.measure(batch).result()
        metrics |= parts.algorithm.derived(metrics)
        named = {f"{VALIDATION}{name.partition('/')[2]}": value for name, value in metrics.items()}
        return named | {f"{VALIDATION}rows": float(len(parts.val))}

    def _batch(self, number: int) -> Batch:
        return collate(self.parts.loader.batch(number - 1))

    def _measure(self, batch: Batch, timings: dict[str, float]) -> dict[str, float]:
        roles, (trained,) = self.parts.roles, self.parts.trained
        seconds = timings[f"timing/update_{trained.name}_s"]
        speed = training_speed(batch, seconds, roles.shape, trained.config.epochs_per_step, roles.compute)
        tokens = float(batch.lengths("prompt_ids").sum() + batch.lengths("response_ids").sum())
        rate = {"perf/tokens": tokens, "perf/tokens_per_s": tokens / timings["timing/step_s"]}
        return {**describe_answers(batch), **rate, **speed}
