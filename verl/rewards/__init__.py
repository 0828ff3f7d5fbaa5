"""Responses in, scores out: one pure function a file, and the runner that calls them with time limits.

Knows nothing of tokens' gradients, devices or the training loop. Importing this package loads no reward.
"""

from __future__ import annotations

from verl.common.registry import Registry

REWARDS = Registry(
    "reward",
    {
        "characters": "verl.rewards.characters:characters",
        "exact": "verl.rewards.exact:exact",
        "gsm8k": "verl.rewards.gsm8k:gsm8k",
        "math": "verl.rewards.math:math",
        "number": "verl.rewards.number:number",
        "reasoning_gym": "verl.rewards.reasoning_gym:reasoning_gym",
    },
)
