"""Prompts to responses: the protocol of rollout engines (``base``), their shared keys (``config``), the engines' table.

An engine's own keys are its ``Config``, a subclass of ``RolloutConfig``: ``ROLLOUT_ENGINES.load(name).Config``.
"""

from verl.common.registry import Registry

ROLLOUT_ENGINES = Registry("rollout engine", {"native": "verl.rollout.native.engine:NativeEngine"})
