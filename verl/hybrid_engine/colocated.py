"""Weights of a rollout engine that shares the actor's storage: nothing is copied, only versions move.

The rollout reads the very tensors that training updates. ``sync`` tells it that they changed, ``check`` refuses a
rollout on weights that its version doesn't name.
"""

from __future__ import annotations

from torch import nn

from verl.common.errors import LayoutError, StaleWeights
from verl.engines.base import TrainingEngine
from verl.rollout.base import RolloutEngine


class SharedWeights:
    """Versions of the weights that ``engine`` trains and ``rollout`` samples from.

    rollout_module  the module that the rollout runs; every parameter must be the actor's own
    Raises LayoutError where it isn't: a rollout of its own would never see an update.
    """

    def __init__(self, engine: TrainingEngine, rollout: RolloutEngine, rollout_module: nn.Module) -> None:
        trained = {name: p.data_ptr() for name, p in engine.network.module.named_parameters()}
        for name, parameter in rollout_module.named_parameters():
            if trained.get(name) != parameter.data_ptr():
                raise LayoutError(f"the rollout's parameter {name!r} doesn't share the actor's storage")
        self.engine, self.rollout = engine, rollout

    @property
    def version(self) -> int:
        """How often the rollout's weights have been refreshed."""
        return self.rollout.policy_version

    def sync(self) -> None:
        """Publish the actor's updates, where there are any, to the rollout as the next version."""
        if self.engine.has_unsynced_update:
            self.set_version(self.version + 1)

    def set_version(self, version: int) -> None:
        """Publish the actor's weights as ``version`` (after a checkpoint was loaded, the one saved with it)."""
        self.rollout.weights_changed(version)
        self.engine.has_unsynced_update = False

    def check(self) -> None:
        """Raise StaleWeights when the actor was updated after the last sync."""
        if self.engine.has_unsynced_update:
            raise StaleWeights(f"the actor was updated after version {self.version} was synced to the rollout")
