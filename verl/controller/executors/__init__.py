"""The executors by name."""

from __future__ import annotations

from verl.common.registry import Registry

EXECUTORS = Registry(
    "executor",
    {
        "inprocess": "verl.controller.executors.inprocess:InProcess",
        "processes": "verl.controller.executors.processes:Processes",
        "torchrun": "verl.controller.executors.torchrun:Torchrun",
        "ray": "verl.controller.executors.ray:Ray",
    },
)
