"""Prompts to responses: the protocol of rollout engines, their shared keys, and the table of engines."""
