"""Worker groups: roles on pools of devices, called from one program through handles. Knows nothing of learning."""

from __future__ import annotations

from verl.controller.controller import Controller, run, serve
from verl.controller.dispatch import (
    Rule,
    broadcast,
    dispatch,
    gather,
    joint,
    last_stage,
    one_rank,
    split_first,
    split_gather,
    split_rows,
)
from verl.controller.dispatch import whole as whole
from verl.controller.group import WorkerGroup
from verl.controller.handle import Handle
from verl.controller.place import Layout, Place
from verl.controller.pool import ResourcePool
from verl.controller.rendezvous import join

__all__ = [
    "Controller",
    "Handle",
    "Layout",
    "Place",
    "ResourcePool",
    "Rule",
    "WorkerGroup",
    "broadcast",
    "dispatch",
    "gather",
    "join",
    "joint",
    "last_stage",
    "one_rank",
    "run",
    "serve",
    "split_first",
    "split_gather",
    "split_rows",
    "whole",
]
