"""The on-policy loop: sample and score, infer, credit, learn, publish. PPO and GRPO differ only in what they declare.

``PPOTrainer.make_step`` is the algorithm; ``run_loop.py`` starts it, resumes it and ends it. Logging, validation,
saving and profiling are callbacks outside the loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from verl.algorithms import ALGORITHMS
from verl.batch import Batch
from verl.observe.metrics import VALIDATION, PhaseTimer
from verl.trainer.assembly import Parts, assemble
from verl.trainer.callbacks import Callback, WriteRollouts, run_file, write_rows
from verl.trainer.inputs import Given, load_inputs, sections_of
from verl.trainer.measures import describe_responses, throughput
from verl.trainer.placement import serve_rank_0
from verl.trainer.run_loop import Made, RunLoop, RunResult
from verl.trainer.sampling import Drawn, Sampled, sample
from verl.trainer.sections import OnPolicyRun
from verl.trainer.validation import evaluate, rollout_rows
from verl.workers.rollout import Rollout

__all__ = ["PPOTrainer", "RunResult"]


class PPOTrainer(RunLoop[OnPolicyRun, Parts]):
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

    Run = OnPolicyRun

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
    def plan(cls, config: OnPolicyRun) -> list[str]:
        """As in RunLoop."""
        inputs = load_inputs(config, Given())
        with inputs.rewards as rewards:
            rewards.start_workers()
            inputs.check_columns()
        train, trainer = inputs.train, config.trainer
        steps = trainer.total_steps or -(-len(train) * (trainer.epochs or 1) // trainer.prompts_per_step)
        algorithm = ALGORITHMS.load(config.algorithm.name)(config.algorithm)
        most = "at most " if trainer.total_steps is None and algorithm.max_generations > 1 else ""
        lines = [f"train: {train.report.summary()}"]
        if inputs.val is not None:
            lines.append(f"val: {inputs.val.report.summary()}")
        return [*lines, f"steps: {most}{steps} of {trainer.prompts_per_step} prompts × {trainer.group_size} responses"]

    def assemble(self, config: OnPolicyRun, given: Given) -> Parts:
        """As in RunLoop."""
        self.drawn = Drawn()
        return assemble(config, given)

    @property
    def batches_drawn(self) -> int:
        """A step may draw several."""
        return self.drawn.batches

    def make_step(self, number: int, timer: PhaseTimer) -> Made:
        """As in RunLoop: one step of the algorithm."""
        parts = self.parts
        with self.interrupts.allowed():  # a signal ends at once what can be thrown away
            self.check_data()
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
        for trained in parts.trained_in(number):
            with timer.phase(f"update_{trained.name}"):
                metrics |= trained.update(batch, step=number, total_steps=self.total_steps).result()
        with timer.phase("sync"):
            parts.weights.sync()
        self.drawn = sampled.drawn
        return Made(batch, metrics, partial(self._measure, sampled))

    def validate(self) -> dict[str, float]:
        """Score ``data.val``, and keep the responses in ``validation/``."""
        parts, config = self.parts, self.config
        if parts.val is None:
            return {}
        sampling = config.rollout.sampling(temperature=config.validation.temperature)
        rollout = Rollout(parts.rollout.engine, parts.tokenizer, sampling, config.validation.samples_per_prompt)
        rows = config.trainer.prompts_per_step * config.trainer.group_size
        found = evaluate(parts.val, rollout, parts.rewards, batch_rows=rows, seed=config.trainer.seed, passing=1.0)
        write_rows(run_file(self, "validation"), found.rows)
        return {f"{VALIDATION}{name}": value for name, value in found.metrics.items()}

    def sample_writers(self) -> list[Callback]:
        """As in RunLoop."""
        return [WriteRollouts(self.config.trainer.save_rollouts_every, _sample_rows)]

    def state_dict(self) -> dict[str, Any]:
        """Version of the weights, and how far the data are."""
        return {"policy_version": self.parts.weights.version, "drawn": asdict(self.drawn)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As in RunLoop."""
        self.parts.weights.set_version(int(state["policy_version"]))
        self.drawn = Drawn(**state["drawn"])

    def _measure(self, sampled: Sampled, timings: dict[str, float]) -> dict[str, float]:
        roles, everything = self.parts.roles, sampled.everything
        passes = roles.actor.config.epochs_per_step
        speed = throughput(everything, timings, roles.shape, passes, roles.compute, trained=sampled.batch)
        version = {"rollout/policy_version": float(everything["policy_version"].max())}
        return {**describe_responses(everything), **version, **speed}


def _sample_rows(batch: Batch, step: int) -> list[dict[str, Any]]:
    return rollout_rows(batch, step=step)
