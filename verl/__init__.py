"""verl: reinforcement learning for large language models after pre-training."""

from __future__ import annotations

__version__ = "0.4.0"
