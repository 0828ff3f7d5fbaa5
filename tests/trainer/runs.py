"""Small runs: the sections of one as plain mappings, a YAML file of them, and what a run left on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

ROOT = Path(__file__).parents[2]
SCRATCH = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "initializer_range": 0.4,
    "tie_word_embeddings": False,
}  # fmt: skip
REWARDS = Path(__file__).with_name("rewards.py")
TIMES = ("timing/", "perf/")


def prompts(count: int) -> list[dict[str, str]]:
    """Sums of two digits, each another one; the answer is the number of the row."""
    return [{"prompt": f"{i // 10}+{i % 10}=", "ground_truth": str(i)} for i in range(count)]


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def sections(folder: Path, rows: int = 8, **changes: Any) -> dict[str, Any]:
    """A GRPO run of two prompts a step on random weights; ``changes`` are dotted keys, with ``__`` for the dots."""
    write_jsonl(folder / "train.jsonl", prompts(rows))
    plain = {
        "model": {"scratch": dict(SCRATCH), "tokenizer": "chars:0123456789+="},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 8},
        "reward": {"function": f"{REWARDS}:digits", "workers": 0},
        "algorithm": {"name": "grpo"},
        "rollout": {"max_response_tokens": 4},
        "actor": {"optim": {"lr": 0.01}},
        "trainer": {
            "output_dir": str(folder / "run"), "prompts_per_step": 2, "group_size": 4, "total_steps": 2,
            "device": "cpu",
        },
        "track": {"trackers": []},
    }  # fmt: skip
    config = OmegaConf.create(plain)
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, merge=not isinstance(value, Mapping), force_add=True)
    made: Any = OmegaConf.to_container(config)
    return made


def config_file(folder: Path, **changes: Any) -> Path:
    """``sections`` as a YAML file in ``folder``."""
    path = folder / "config.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(sections(folder, **changes))), encoding="utf-8")
    return path


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock or a memory gauge measured."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(TIMES)} for line in lines]


def rollouts_of(run: Path, kind: str = "rollouts") -> dict[str, list[dict[str, Any]]]:
    """Rows of each file of samples, by its name."""
    files = sorted((run / kind).glob("*.jsonl"))
    return {f.name: [json.loads(line) for line in f.read_text(encoding="utf-8").splitlines()] for f in files}


def checkpoints_of(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step_*"))


def verl(*words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """``python -m verl`` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "verl", *words], env=environment(), capture_output=True, text=True, timeout=120,
        check=False, **settings,
    )  # fmt: skip


def environment() -> dict[str, str]:
    """The test's own, with this checkout importable from anywhere."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
