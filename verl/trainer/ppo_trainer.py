"""The on-policy loop: sample and score, infer, credit, learn, publish. PPO and GRPO differ only in what they declare.

``PPOTrainer.step`` is the algorithm; everything else here starts it, resumes it or ends it. Logging, validation,
saving and profiling are callbacks outside the loop.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.common.errors import ConfigError, RunIncomplete, StaleWeights
from verl.observe.metrics import PhaseTimer
from verl.observe.profiler import ProfileConfig, StepProfiler
from verl.trainer.assembly import Parts, assemble
from verl.trainer.callbacks import Callback, default_callbacks
from verl.trainer.inputs import Given, sections_of
from verl.trainer.interrupts import Interrupted, Interrupts
from verl.trainer.measures import describe_responses, throughput
from verl.trainer.placement import serve_rank_0
from verl.trainer.resume import prepare_folder, restore
from verl.trainer.run_claim import RunClaim
from verl.trainer.sampling import Drawn, Sampled, sample
from verl.trainer.sections import OnPolicyRun

log = logging.getLogger(__name__)


@dataclass
class RunResult:
    """How a run ended: steps made in all, metrics of the last one, the signal's exit code if it was interrupted."""

    steps: int
    metrics: dict[str, float] = field(default_factory=dict)
    exit_code: int = 0


class PPOTrainer:
    """Trains a causal language model with PPO, GRPO and their family.

    model      folder or hub name, a transformers module, or the keys of the ``model`` section
    data       file, folder, list of mappings, ``datasets.Dataset``, or the keys of the ``data`` section
    reward     registry name, ``file.py:function``, a function ``(prompt, response, ground_truth, **row) -> float``,
               a ``RewardModel``, or the keys of the ``reward`` section
    tokenizer  a tokenizer or where to load it from; default: beside the model
    val        held-out prompts, as ``data``
    algorithm  name or keys of the ``algorithm`` section
    callbacks  instead of those that the config asks for (``default_callbacks``), which also write metrics and save
    sections   rollout, actor, critic, reference, validation, trainer, profile: keys as in a YAML config

    Under torchrun rank 0 is the program and the other ranks are its workers: there the constructor serves rank 0 until
    its trainer is closed or its process ends, and leaves with SystemExit(0), so what follows it runs on rank 0 alone.

    Raises ConfigError or DataError for anything wrong before a model is loaded, where it can be known by then.
    """

    def __init__(
        self,
        model: Any,
        data: Any,
        reward: Any,
        *,
        tokenizer: Any = None,
        val: Any = None,
        algorithm: str | Mapping[str, Any] = "grpo",
        callbacks: list[Callback] | None = None,
        **sections: Any,
    ) -> None:
        serve_rank_0()
        config, given = sections_of(
            model=model, data=data, reward=reward, tokenizer=tokenizer, val=val, algorithm=algorithm, **sections
        )
        self._set_up(config, given, callbacks)

    @classmethod
    def from_config(cls, config: OnPolicyRun, callbacks: list[Callback] | None = None) -> PPOTrainer:
        """The trainer of an already validated config; under torchrun as the constructor."""
        serve_rank_0()
        trainer = cls.__new__(cls)
        trainer._set_up(config, Given(), callbacks)
        return trainer

    def _set_up(self, config: OnPolicyRun, given: Given, callbacks: list[Callback] | None) -> None:
        config = _at_one_place(config)
        prepare_folder(config.trainer)
        self.claim = RunClaim(config.trainer.output_dir)
        self.claim.take()
        self.config = config
        self.parts: Parts = assemble(config, given)
        self.steps_done, self.drawn = 0, Drawn()
        self.is_whole = True
        self.metrics: dict[str, float] = {}
        self.interrupts = Interrupts()
        self.callbacks = default_callbacks(self) if callbacks is None else callbacks
        self._asked = 0
        self._is_started = False
        self.profiler = StepProfiler(ProfileConfig(), config.trainer.output_dir, rank=0, total_steps=1)
        try:
            restore(self)
        except BaseException:
            self.close()
            raise

    @property
    def last_step(self) -> int:
        """Where ``run`` stops: after the steps that it was asked for, else after those of the config.

        Epochs make at most as many steps as batches of prompts; fewer where steps drew several.
        """
        if steps := self._asked or self.config.trainer.total_steps:
            return steps
        one_epoch = math.ceil(len(self.parts.train) / self.config.trainer.prompts_per_step)
        batches = self.parts.loader.num_batches or one_epoch
        return batches if self.drawn.batches < batches else min(batches, self.steps_done)

    @property
    def total_steps(self) -> int:
        """Steps that the learning rate's schedule spans: the config's, or more where ``run`` was asked for more."""
        return max(self._asked, self.config.trainer.total_steps or self.parts.loader.num_batches or 0) or self.last_step

    def step(self) -> dict[str, float]:
        """One step of the loop. Returns its metrics. Raises RunIncomplete when the data have ended."""
        self._start()
        parts, number, timer = self.parts, self.steps_done + 1, PhaseTimer()
        with self.interrupts.protected():  # a signal waits for the end of the step,
            with self.profiler.step(number), timer.phase("step"):
                with self.interrupts.allowed():  # but not for what can be thrown away
                    self._check_data()
                    parts.weights.check()
                    sampled = sample(parts, self.config.trainer, self.drawn, step=number, timer=timer)
                    batch, metrics = sampled.batch, sampled.metrics
                    parts.rollout.engine.sleep()  # its cache makes room for what follows
                    for role in parts.passes:
                        with timer.phase(role.writes):
                            role.infer(batch)
                self.is_whole = False
                with timer.phase("advantages"):
                    metrics |= parts.algorithm.advantages(batch)
                for trained in parts.trained:
                    with timer.phase(f"update_{trained.name}"):
                        metrics |= trained.update(batch, step=number, total_steps=self.total_steps).result()
                with timer.phase("sync"):
                    parts.weights.sync()
                self.steps_done, self.drawn, self.is_whole = number, sampled.drawn, True
            self.metrics = self._measured(sampled, metrics, timer.result())
            for callback in self.callbacks:
                callback.on_step(self, batch, self.metrics)
        return self.metrics

    def run(self, num_steps: int | None = None) -> RunResult:
        """Train until ``num_steps`` more steps than all earlier calls asked for are made; steps of a resumed run count.

        Without ``num_steps``: until the config's total. A signal ends the run at once while responses are sampled and
        scored, else after the step, with a checkpoint. Raises RunIncomplete when the data end before the steps do.
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
        """Save what ``step`` made outside ``run``, end the trackers and the reward workers, give the model back.

        A program that ends without it leaves no worker behind either.
        """
        try:
            self._end()
        finally:
            self.parts.rewards.close()
            self.parts.give_model_back()
            self.claim.release()

    def _start(self) -> None:
        if not self.is_whole:
            raise StaleWeights(f"step {self.steps_done + 1} broke off within its update: start again from a checkpoint")
        if self._is_started:
            return
        self.claim.take()
        self._is_started = True
        self.parts.take_model()
        folder = self.config.trainer.output_dir
        self.profiler = StepProfiler(self.config.profile, folder / "traces", rank=0, total_steps=self.last_step)
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

    def _check_data(self) -> None:
        if self.parts.loader.ends_at(self.drawn.batches):
            raise RunIncomplete(
                f"the data end after step {self.steps_done} of {max(self.last_step, self.steps_done + 1)}: raise "
                "trainer.epochs, or leave it out so that prompts repeat until trainer.total_steps"
            )

    def _measured(self, sampled: Sampled, metrics: dict[str, float], timings: dict[str, float]) -> dict[str, float]:
        parts, everything = self.parts, sampled.everything
        passes = parts.actor.config.epochs_per_step
        speed = throughput(everything, timings, parts.shape, passes, parts.compute, trained=sampled.batch)
        speed["perf/peak_memory_bytes"] = float(parts.peak_memory_bytes())
        version = {"rollout/policy_version": float(everything["policy_version"].max())}
        return {**metrics, **describe_responses(everything), **version, **timings, **speed}


def _at_one_place(config: OnPolicyRun) -> OnPolicyRun:
    """``config`` with an absolute ``trainer.output_dir``: a reward or a notebook may change the working folder."""
    trainer = config.trainer.model_copy(update={"output_dir": config.trainer.output_dir.absolute()})
    return config.model_copy(update={"trainer": trainer})
