"""What callbacks and checkpoints see of a trainer: its config, its parts, how far it is."""

from __future__ import annotations

from typing import Protocol

from verl.trainer.assembly import Parts
from verl.trainer.sampling import Drawn
from verl.trainer.sections import OnPolicyRun


class RunInProgress(Protocol):
    """A trainer between two of its steps, or before its first."""

    config: OnPolicyRun
    parts: Parts
    steps_done: int
    """Whole steps made, those of a resumed run counted."""
    drawn: Drawn
    """How far the data are after those steps."""
    is_whole: bool
    """False when a step broke off within its update: the weights belong to no step."""
    metrics: dict[str, float]
    """Of the last step; before the first one, of the validation at the start."""

    @property
    def last_step(self) -> int:
        """Where the run stops."""
        ...
