"""Speed and memory on synthetic work: ``verl bench step``.

A real trainer on random weights and random prompts: what is timed is the product's own loop, by its own phases.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from verl.bench.setting import LETTERS, SMALL_MODEL, figure_lines, machine_setting
from verl.common.errors import ConfigError
from verl.config import parse_overrides
from verl.models.loading import outline_of
from verl.trainer.inputs import pick_device
from verl.trainer.ppo_trainer import PPOTrainer

DEFAULTS = {
    "model": SMALL_MODEL,
    "data": {"max_prompt_tokens": 32},
    "reward": {"workers": 0},
    "rollout": {"name": "native", "max_response_tokens": 64, "ignore_eos": True},
    "trainer": {"prompts_per_step": 8, "group_size": 8},
    "actor": {"optim": {"lr": 1e-6}},
}
"""Work that a laptop does in seconds; overrides make it any other."""


def measure_step(overrides: Sequence[str], steps: int) -> dict[str, Any]:
    """Medians over ``steps`` GRPO steps, after one uncounted, on prompts of exactly ``data.max_prompt_tokens``.

    overrides  ``key.path=value`` words over ``DEFAULTS``, such as model.scratch.hidden_size=1536
    Returns metrics by their usual names and, under ``setting``, what was run on what.
    """
    if steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {steps}")
    merged = OmegaConf.merge(DEFAULTS, parse_overrides(overrides))
    if OmegaConf.select(merged, "profile.steps") and OmegaConf.select(merged, "trainer.output_dir") is None:
        raise ConfigError("profile.steps traces into trainer.output_dir, and none is named: set it to a folder")
    sections: Any = OmegaConf.to_container(merged)
    with tempfile.TemporaryDirectory(prefix="verl-bench-") as folder:
        sections["trainer"].setdefault("output_dir", folder)  # who names one keeps what is written, such as traces
        sections["data"]["train"] = _prompts(sections)
        sections["reward"]["function"] = _reward
        trainer = PPOTrainer(**sections, callbacks=[])
        rows = []
        for _ in range(steps + 1):
            rows.append(trainer.step())
        trainer.close()
    measured = rows[1:]
    keep = [k for k in measured[0] if k.startswith(("timing/", "perf/")) or "rollout_log_prob_diff" in k]
    result: dict[str, Any] = {name: statistics.median(row[name] for row in measured) for name in keep}
    result["first_step_s"] = rows[0]["timing/step_s"]
    result["setting"] = _setting(trainer, steps)
    return result


def step_lines(found: dict[str, Any]) -> list[str]:
    """One aligned line a figure."""
    return figure_lines({**found["setting"], **{k: v for k, v in found.items() if k != "setting"}})


def _setting(trainer: PPOTrainer, steps: int) -> dict[str, Any]:
    config = trainer.config
    outline = outline_of(config.model, trainer.parts.tokenizer)  # the weights themselves may be at the workers
    return {
        **machine_setting(pick_device(config.trainer.device), outline),
        "executor": config.placement.kind,
        "actor_devices": config.placement.num_devices * config.placement.nodes,
        "prompts_per_step": config.trainer.prompts_per_step,
        "group_size": config.trainer.group_size,
        "prompt_tokens": config.data.max_prompt_tokens,
        "response_tokens": config.rollout.max_response_tokens,
        "steps": steps,
    }


def _prompts(sections: dict[str, Any]) -> list[dict[str, str]]:
    generator = random.Random(0)
    length, rows = int(sections["data"]["max_prompt_tokens"]), int(sections["trainer"]["prompts_per_step"]) * 4
    return [{"prompt": "".join(generator.choices(LETTERS, k=length)), "ground_truth": ""} for _ in range(rows)]


def _reward(response: str) -> float:
    return len(response) % 7 / 7
