"""An optimizer's state as a folder: by parameter name, whatever the order, the groups or the ranks.

In comes a live optimizer, over whole weights or over slices of sharded ones; what is written can be read back on other
ranks. When and where is the store's business (``checkpoint.py``).
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from verl.common.errors import CheckpointError
from verl.common.files import write_json
from verl.common.ranks import is_distributed, is_first_rank
from verl.engines.fsdp import local_part, sharded_like

log = logging.getLogger(__name__)

_OPTIMIZER = "optimizer.json"


@dataclass(frozen=True)
class OptimizerState:
    """What ``write_optimizer`` writes.

    described  the same on every rank: shapes, kinds of state, hyperparameters
    tensors    this rank's, or its slices
    """

    described: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def optimizer_state(
    optimizer: Optimizer,
    masters: Mapping[str, Tensor] | None = None,
    *,
    parameters: Mapping[str, Tensor] | None = None,
) -> OptimizerState:
    """An optimizer's state by parameter name. The tensors are the optimizer's own.

    masters     further tensors to keep beside it, by parameter name: float32 masters of low-precision weights
    parameters  fully qualified name -> the tensor that the optimizer steps, or the sharded one whose slice it steps;
                not needed for an optimizer that was built from whole named parameters
    With an initialised process group every rank must call this.
    """
    names = _names(optimizer, parameters)
    wholes = parameters or {}
    tensors, scalars = _state_by_name(optimizer, names, wholes)
    groups = [
        {"parameters": [names[id(p)] for p in group["params"]], **_hyperparameters(group)}
        for group in optimizer.param_groups
    ]
    shapes = {name: list(p.shape) for name, p in _stepped(optimizer, names, wholes)}
    kinds = {name: sorted(state) for name, state in tensors.items()}
    held = dict.fromkeys(masters or {})
    described = _of_all_ranks({"shapes": shapes, "tensors": kinds, "scalars": scalars, "masters": held})
    if len(groups) == 1:
        groups[0]["parameters"] = sorted(described["shapes"])
    flat = {_key(kind, name): tensor for name, state in tensors.items() for kind, tensor in state.items()}
    flat.update({_key("master", name): tensor.detach() for name, tensor in (masters or {}).items()})
    return OptimizerState({**described, "groups": groups, "masters": sorted(described["masters"])}, flat)


def write_optimizer(folder: Path, state: OptimizerState, group: ProcessGroup | None = None) -> None:
    """Write ``state`` with torch.distributed.checkpoint.

    group  of all ranks, where training goes on meanwhile on the default one
    With an initialised process group every rank must call this, and sharded tensors are written by their owners.
    Raises CheckpointError on every rank where one fails, or where the first one doesn't see what others wrote.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    is_empty = not (state.described["masters"] or any(state.described["tensors"].values()))
    if not is_empty:
        with _dcp(folder):
            save(
                dict(state.tensors),
                # no copying ahead: that would make a CUDA context of the first device on a thread which has no device
                storage_writer=FileSystemWriter(folder, per_thread_copy_ahead=0),
                process_group=group,
                no_dist=not is_distributed(),
            )
    if is_first_rank():
        if not is_empty:
            _check_all_there(folder, FileSystemReader(folder).read_metadata().storage_data)
        write_json(folder / _OPTIMIZER, state.described)


def save_optimizer(
    folder: Path,
    optimizer: Optimizer,
    masters: Mapping[str, Tensor] | None = None,
    *,
    parameters: Mapping[str, Tensor] | None = None,
) -> None:
    """``write_optimizer`` of ``optimizer_state``."""
    write_optimizer(folder, optimizer_state(optimizer, masters, parameters=parameters))


def load_optimizer(
    folder: Path,
    optimizer: Optimizer,
    masters: Mapping[str, Tensor] | None = None,
    *,
    parameters: Mapping[str, Tensor] | None = None,
) -> None:
    """Put the state of ``save_optimizer`` back: moments and counters, each group's learning rate, and ``masters``.

    Other hyperparameters stay as the optimizer was built, since the run's config decides them; a log line names those
    that differ. The number of ranks and the grouping may differ from when it was saved; names and shapes may not:
    CheckpointError names the first ones that do, before anything has been changed.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    names = _names(optimizer, parameters)
    try:
        saved = json.loads((folder / _OPTIMIZER).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} holds no optimizer state: {error}") from error
    live = _of_all_ranks({"parameters": dict.fromkeys(names.values()), "masters": dict.fromkeys(masters or {})})
    _check_same("parameters", folder, set(saved["shapes"]), set(live["parameters"]))
    _check_same("masters", folder, set(saved["masters"]), set(live["masters"]))
    wholes = parameters or {}
    _check_shapes(folder, [*_stepped(optimizer, names, wholes), *(masters or {}).items()], saved["shapes"])
    flat: dict[str, Tensor] = {_key("master", name): tensor.detach() for name, tensor in (masters or {}).items()}
    is_empty = not flat and not any(saved["tensors"].values())
    stored = {} if is_empty else FileSystemReader(folder).read_metadata().state_dict_metadata
    states = _states_to_fill(optimizer, names, wholes, saved, stored)
    for name, state in states.items():
        flat.update({_key(kind, name): tensor for kind, tensor in state.items()})
    if flat:
        with _dcp(folder):
            load(flat, storage_reader=FileSystemReader(folder), no_dist=not is_distributed())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            filled = {kind: _as_stepped(tensor, parameter) for kind, tensor in states.get(name, {}).items()}
            optimizer.state[parameter] = {**filled, **saved["scalars"].get(name, {})}
            if not optimizer.state[parameter]:
                del optimizer.state[parameter]
    _restore_rates(optimizer, names, saved["groups"])


def _names(optimizer: Optimizer, parameters: Mapping[str, Tensor] | None) -> dict[int, str]:
    """id of each tensor that the optimizer steps -> its fully qualified name."""
    names = {id(tensor): name for name, tensor in (parameters or {}).items()}
    for group in optimizer.param_groups:
        names.update({id(p): n for p, n in zip(group["params"], group.get("param_names", []), strict=False)})
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    if nameless := [list(p.shape) for p in stepped if id(p) not in names]:
        raise CheckpointError(
            f"{len(nameless)} tensors of the optimizer have no name (the first has shape {nameless[0]}): build it from "
            "named_parameters(), or give `parameters`"
        )
    return {id(p): names[id(p)] for p in stepped}


def _stepped(
    optimizer: Optimizer, names: Mapping[int, str], wholes: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """What the optimizer steps, by name, as the whole or sharded tensor that it is a part of."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            yield name, wholes.get(name, parameter)


def _as_part(tensor: Tensor, parameter: Tensor, whole: Tensor | None) -> Tensor:
    """State of ``parameter``: where that is a slice of ``whole``, as the slice of a tensor sharded like it."""
    if not isinstance(whole, DTensor) or isinstance(parameter, DTensor):
        return tensor
    return sharded_like(tensor, whole) if tensor.dim() and tensor.shape == parameter.shape else tensor


def _as_stepped(tensor: Tensor, parameter: Tensor) -> Tensor:
    return tensor if isinstance(parameter, DTensor) else local_part(tensor)


def _state_by_name(
    optimizer: Optimizer, names: Mapping[int, str], wholes: Mapping[str, Tensor]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, Any]]]:
    tensors: dict[str, dict[str, Tensor]] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = names[id(parameter)]
        found = {kind: value for kind, value in state.items() if isinstance(value, Tensor)}
        tensors[name] = {kind: _as_part(value, parameter, wholes.get(name)) for kind, value in found.items()}
        scalars[name] = {kind: value for kind, value in state.items() if not isinstance(value, Tensor)}
    return tensors, scalars


def _states_to_fill(
    optimizer: Optimizer,
    names: Mapping[int, str],
    wholes: Mapping[str, Tensor],
    saved: Mapping[str, Any],
    stored: Mapping[str, Any],
) -> dict[str, dict[str, Tensor]]:
    """name -> kind -> the tensor to read into: the live one where it fits, else a new one beside the parameter."""
    states: dict[str, dict[str, Tensor]] = {}
    for group in optimizer.param_groups:
        is_on_device = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            name = names[id(parameter)]
            whole = wholes.get(name, parameter)
            for kind in saved["tensors"].get(name, []):
                what = stored[_key(kind, name)]
                live = optimizer.state[parameter].get(kind) if parameter in optimizer.state else None
                if isinstance(live, Tensor):
                    live = _as_part(live, parameter, whole)
                if not isinstance(live, Tensor) or live.shape != what.size or live.dtype != what.properties.dtype:
                    live = _beside(whole, what.size, what.properties.dtype, is_on_device)
                states.setdefault(name, {})[kind] = live
    return states


def _beside(parameter: Tensor, size: torch.Size, dtype: torch.dtype, is_on_device: bool) -> Tensor:
    if size == parameter.shape and len(size):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)  # sharded like the parameter
    return torch.zeros(size, dtype=dtype, device=parameter.device if len(size) or is_on_device else "cpu")


def _check_same(what: str, folder: Path, saved: set[str], live: set[str]) -> None:
    if missing := sorted(live - saved):
        raise CheckpointError(f"{folder} lacks {len(missing)} of the optimizer's {what}, such as {missing[0]!r}")
    if extra := sorted(saved - live):
        raise CheckpointError(f"{folder} holds {len(extra)} {what} that the optimizer lacks, such as {extra[0]!r}")


def _check_shapes(folder: Path, live: Iterable[tuple[str, Tensor]], shapes: Mapping[str, list[int]]) -> None:
    for name, tensor in live:
        if list(tensor.shape) != shapes.get(name, list(tensor.shape)):
            raise CheckpointError(f"{folder}: {name!r} was {shapes[name]}, in this run it is {list(tensor.shape)}")


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}
    return {key: value for key, value in kept.items() if isinstance(value, bool | int | float | str | list | None)}


def _restore_rates(optimizer: Optimizer, names: Mapping[int, str], groups: list[dict[str, Any]]) -> None:
    group_of = {name: group for group in groups for name in group["parameters"]}
    for group in optimizer.param_groups:
        if not group["params"]:
            continue
        saved = group_of[names[id(group["params"][0])]]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(saved["lr"])
        else:
            group["lr"] = saved["lr"]
        differing = {k: (saved[k], v) for k, v in _hyperparameters(group).items() if k in saved and saved[k] != v}
        for key, (old, new) in differing.items():
            log.warning("the optimizer's %s was %r when it was saved and is %r in this run", key, old, new)


def _plain(value: Any) -> Any:
    """``value`` with tuples and tensors as lists and numbers, for JSON."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if isinstance(value, Tensor) else value


def _key(kind: str, name: str) -> str:
    return f"{kind}.{name}"


def _of_all_ranks(own: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Mappings by parameter name, joined over all ranks: a stage of a pipeline knows its own parameters only."""
    if not is_distributed():
        return own
    every: list[dict[str, dict[str, Any]]] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, own)
    return {kind: {name: value for part in every for name, value in part[kind].items()} for kind in own}


def _check_all_there(folder: Path, stored: Mapping[Any, Any]) -> None:
    """Raises CheckpointError where a rank wrote to storage that isn't this one's."""
    if missing := sorted({info.relative_path for info in stored.values()} - {path.name for path in folder.iterdir()}):
        raise CheckpointError(
            f"{len(missing)} files that other ranks wrote aren't in {folder}, such as {missing[0]}: trainer.output_dir "
            "must be on storage that every worker shares"
        )


@contextmanager
def _dcp(folder: Path) -> Iterator[None]:
    """torch.distributed.checkpoint without its word on single processes, and with errors that ``except`` can catch."""
    from torch.distributed.checkpoint.api import CheckpointException

    # for good: what one thread sets aside for a moment and puts back, another one may have changed meanwhile
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    try:
        yield
    except CheckpointException as error:
        rank, (first, _) = next(iter(sorted(error.failures.items())))
        raise CheckpointError(f"optimizer state in {folder}, rank {rank}: {first}") from error
