"""What callbacks and checkpoints see of a trainer: its config, its parts, how far it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from verl.trainer.base_sections import Run
from verl.trainer.parts import RunParts


class RunInProgress(Protocol):
    """A trainer between two of its steps, or before its first."""

    steps_done: int
    """Whole steps made, those of a resumed run counted."""
    is_whole: bool
    """False when a step broke off within its update: the weights belong to no step."""
    is_sound: bool
    """False when a step found that the weights it began with give numbers that aren't finite."""
    metrics: dict[str, float]
    """Of the last step; before the first one, of the validation at the start."""

    @property
    def config(self) -> Run:
        """The effective one."""
        ...

    @property
    def parts(self) -> RunParts:
        """What the loop uses."""
        ...

    @property
    def last_step(self) -> int:
        """Where the run stops."""
        ...

    def validate(self) -> dict[str, float]:
        """Metrics of the held-out rows as the weights are now; none without any."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the trainer itself."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state_dict`` gave."""
        ...
