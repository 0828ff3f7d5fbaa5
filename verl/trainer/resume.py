"""What a run saves to go on as if it had never stopped, and how it goes on.

Draws are functions of (seed, step), so no generator state is needed: weights, optimizers, counters and the
algorithm's own state are all there is. Where and how it is written whole is ``checkpoint.py``'s business.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from verl.common.background import Background
from verl.common.errors import CheckpointError, ConfigError, VerlError
from verl.observe.memory import available_bytes
from verl.trainer.base_sections import BaseTrainerConfig
from verl.trainer.checkpoint import JSON, CheckpointStore, changed_keys
from verl.trainer.parts import RunParts
from verl.trainer.run_in_progress import RunInProgress

log = logging.getLogger(__name__)

_FIXED = ("model.", "algorithm.name")
"""Keys without which a checkpoint belongs to another run."""
_FREE = ("trainer.", "track.", "validation.", "profile.", "placement.", "data.val", "data.max_val_rows")
"""Keys that change what is made or shown, not what was learnt; of ``trainer`` all but those below."""
_HOW = re.compile(
    r"(actor|critic|reference)\.(parallel\.\w+|max_tokens_per_micro_batch|offload_parameters|offload_optimizer"
    r"|gradient_checkpointing|reshard_after_forward|compile)"
    r"|rollout\.(block_size|cache_tokens|memory_frac|max_running_rows|max_prefill_tokens|prefix_cache|use_cuda_graph)"
    r"|reward\.(workers|cache)"
)
"""Keys that change memory and speed, and of the numbers no more than how they round."""
_CURVE = ("trainer.seed", "trainer.prompts_per_step", "trainer.group_size", "trainer.rows_per_step")
_TRACES_OF_A_RUN = ("checkpoints", "metrics.jsonl")


def holds_run(config: BaseTrainerConfig) -> bool:
    """Whether the run directory already holds steps of a run."""
    return any((config.output_dir / name).exists() for name in _TRACES_OF_A_RUN)


def prepare_folder(config: BaseTrainerConfig) -> None:
    """Make the run directory and see that it can be written.

    Raises ConfigError when it can't, or when ``trainer.resume=never`` and it already holds a run.
    """
    folder = config.output_dir
    if config.resume == "never" and holds_run(config):
        found = ", ".join(name for name in _TRACES_OF_A_RUN if (folder / name).exists())
        raise ConfigError(
            f"trainer.output_dir={str(folder)!r} holds a run ({found}) and trainer.resume is never: name another "
            f"folder, or set trainer.resume=auto to go on with it"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            file.write(b"0" * 4096)
    except OSError as error:
        raise ConfigError(f"trainer.output_dir={str(folder)!r} can't be written: {error}") from error


def save(trainer: RunInProgress, background: Background) -> None:
    """Begin to commit a checkpoint of the last whole step, by ``background``, after the one before is done.

    With ``trainer.async_save`` only copies of the tensors are made here, else it is done on return. Raises
    CheckpointError, also that of the one before; older checkpoints stay as they are.
    """
    parts, config = trainer.parts, trainer.config
    background.wait()
    needed = _least_bytes(parts)
    copied = config.trainer.async_save and _has_memory_for(needed // config.placement.nodes)
    taken = {role.name: role.engine.snapshot(parts.tokenizer, copied=copied) for role in parts.roles.trainable}
    state: dict[str, JSON] = {
        **trainer.state_dict(),
        "algorithm": parts.algorithm.state_dict(),
        "config": config.model_dump(mode="json"),
        "train_fingerprint": parts.train.fingerprint,
    }
    writers = {name: snapshot.write for name, snapshot in taken.items()}
    commit = partial(_store(trainer).save, trainer.steps_done, writers, state, needed)
    background.start(partial(_said_at_once, commit) if copied else commit)
    if not copied:
        background.wait()


def _said_at_once(commit: Callable[[], object]) -> None:
    """The loop will raise the error, which may take it a long step; and a later error may hide this one."""
    try:
        commit()
    except VerlError as error:
        log.error("%s", error)
        raise


def _has_memory_for(copies_bytes: int) -> bool:
    available = available_bytes()
    if copies_bytes > available:
        log.warning(
            "trainer.async_save needs %.1f GB of main memory for copies and %.1f are free: the run waits while this "
            "checkpoint is written",
            copies_bytes / 1e9,
            available / 1e9,
        )
    return copies_bytes <= available


def check_room(trainer: RunInProgress) -> None:
    """Raise CheckpointError when the disk can't hold the first checkpoint of this run, before a step is made for it."""
    every = trainer.config.trainer.save_every or trainer.last_step
    step = min(trainer.last_step, (trainer.steps_done // every + 1) * every)
    if step > trainer.steps_done:
        _store(trainer).check_room(step, _least_bytes(trainer.parts))


def _store(trainer: RunInProgress) -> CheckpointStore:
    config = trainer.config.trainer
    return CheckpointStore(config.output_dir, config.keep_checkpoints)


def _least_bytes(parts: RunParts) -> int:
    """What the tensors of a checkpoint take."""
    return sum(role.engine.checkpoint_bytes() for role in parts.roles.trainable)


def restore(trainer: RunInProgress) -> None:
    """Take up the newest whole checkpoint of the run directory, if there is one and ``trainer.resume`` allows it.

    Raises ConfigError when it belongs to another model or algorithm, CheckpointError when it doesn't fit or when there
    are checkpoints and all are damaged: a start from nothing would write over what may still be mended.
    """
    config = trainer.config
    if config.trainer.resume != "auto" or not (config.trainer.output_dir / "checkpoints").is_dir():
        return
    try:
        checkpoint = _store(trainer).latest()
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. Mend one, or set trainer.output_dir to another folder to start anew"
        ) from error
    if checkpoint is None:
        return
    _check_config(checkpoint.state["config"], config.model_dump(mode="json"), checkpoint.path)
    parts = trainer.parts
    if checkpoint.state["train_fingerprint"] != parts.train.fingerprint:
        log.warning("data.train holds other rows than when %s was saved: not the same curve", checkpoint.path)
    for role in parts.roles.trainable:
        role.engine.restore(checkpoint.part(role.name))
    parts.algorithm.load_state_dict(checkpoint.state["algorithm"])
    trainer.steps_done = checkpoint.step
    trainer.load_state_dict(checkpoint.state)
    log.info("going on from %s after step %d", checkpoint.path, checkpoint.step)


def _check_config(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> None:
    changed = changed_keys(old, new)
    fixed = {k: v for k, v in changed.items() if k.startswith(_FIXED)}
    if fixed:
        raise ConfigError(
            f"{path} belongs to another run: {_list(fixed)}. Name another trainer.output_dir, or set the keys back"
        )
    curve = {k: v for k, v in changed.items() if k in _CURVE or not (k.startswith(_FREE) or _HOW.fullmatch(k))}
    if curve:
        log.warning(
            "resuming with other keys than the checkpoint was made with, so not the same curve: %s", _list(curve)
        )


def _list(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in changed.items())
