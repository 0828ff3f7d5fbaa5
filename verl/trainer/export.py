"""A model out of a run: a folder that plain transformers loads, whole or absent.

In comes a run folder, one checkpoint's folder or a model folder; out goes a model folder, its weights converted one
file at a time, so that the model is never in memory as a whole. It doesn't know what the model computes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from verl.common import files
from verl.common.errors import CheckpointError, ConfigError, did_you_mean
from verl.trainer.checkpoint import FOLDER, STATE, Checkpoint, CheckpointStore, open_checkpoint

ADAPTER = "adapter_config.json"
_INDEX = "model.safetensors.index.json"
_MAIN_ROLES = ("actor", "reward_model")
_DTYPES = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
}


def export_checkpoint(source: Path, target: Path, dtype: str | None = None, role: str | None = None) -> Path:
    """Write the model of ``role`` in ``source`` to the new folder ``target``, and return that; an adapter is merged
    into the model below it.

    role    None: what the run was for, the actor or else the reward model
    source  a run folder (its newest complete checkpoint), a checkpoint's folder (every byte is verified) or a model's
    dtype   "float32", "bfloat16", "float16" (or fp32, bf16, fp16): type of the weights; None keeps them
    Raises CheckpointError for a source without such a model, an unfit target or a full disk, ConfigError for a dtype.
    """
    source, target = Path(source).absolute(), Path(target).absolute()
    if dtype is not None and dtype not in _DTYPES:
        known = ", ".join(sorted(set(_DTYPES.values())))
        raise ConfigError(f"dtype is one of {known}, got {dtype!r}{did_you_mean(dtype, _DTYPES)}")
    model = find_model(source, role)
    _check_target(model, target)
    if (model / ADAPTER).is_file():
        return _export_merged(model, target, dtype)
    names = [path.relative_to(model) for path in sorted(model.rglob("*")) if path.is_file() and not _is_hidden(path)]
    try:
        with files.folder_written_aside(target) as aside:
            for name in names:
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                if dtype is None:
                    shutil.copyfile(model / name, aside / name)
                else:
                    _convert(model / name, aside / name, _DTYPES[dtype])
            if dtype is not None:
                _fix_index(aside)
    except Exception as error:
        if files.is_out_of_space(error) or isinstance(error, OSError):
            raise CheckpointError(
                f"the export to {target} failed, {files.free_bytes(target):,} bytes are free there: {error}"
            ) from error
        raise
    return target


def _export_merged(adapter: Path, target: Path, dtype: str | None) -> Path:
    """As ``export_checkpoint``; the merged model is in memory as a whole, in float32."""
    from functools import partial

    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils.logging import disable_progress_bar

    from verl.engines.saved_model import save_model
    from verl.models.lora import is_classifier, load_adapter, load_merged
    from verl.models.whole import load_whole

    disable_progress_bar()
    tensors = load_adapter(adapter)
    trained_in = next(iter(tensors.values())).dtype
    load = partial(load_whole, AutoModelForCausalLM)
    if is_classifier(adapter):  # the adapter brings the head
        load = partial(load_whole, AutoModelForSequenceClassification, num_labels=1, given=tensors)
    try:
        merged = load_merged(str(adapter), partial(load, dtype=torch.float32))
        with files.folder_written_aside(target) as aside:
            save_model(aside, merged, dtype=trained_in if dtype is None else getattr(torch, _DTYPES[dtype]))
            for path in adapter.iterdir():
                if path.is_file() and not _is_hidden(path) and not path.name.startswith("adapter_"):
                    shutil.copyfile(path, aside / path.name)
    except OSError as error:
        raise CheckpointError(f"the adapter in {adapter} can't be merged and written to {target}: {error}") from error
    return target


def find_model(source: Path, role: str | None = None) -> Path:
    """The model folder of ``role``, as in ``export_checkpoint``, in the folder of a run or a checkpoint, or ``source``
    itself, which is a model already."""
    if not source.is_dir():
        raise CheckpointError(f"{source} is no folder")
    if (source / STATE).exists() or (source / files.MANIFEST).exists():
        return _part(open_checkpoint(source, hash_limit_bytes=None), role)
    run = source.parent if source.name == FOLDER else source
    if (run / FOLDER).is_dir():
        checkpoint = CheckpointStore(run).latest()
        if checkpoint is None:
            raise CheckpointError(f"{run / FOLDER} holds no complete checkpoint yet")
        return _part(checkpoint, role)
    if (source / "config.json").exists() or (source / ADAPTER).exists():
        return source
    raise CheckpointError(f"{source} is no run folder ({FOLDER}/), no checkpoint ({STATE}) and no model (config.json)")


def _part(checkpoint: Checkpoint, role: str | None) -> Path:
    if role is None:
        role = next((name for name in _MAIN_ROLES if f"{name}/model" in checkpoint.parts), _MAIN_ROLES[0])
    return checkpoint.part(f"{role}/model")


def _check_target(model: Path, target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and isn't an empty folder: choose another one")
    if target.resolve().is_relative_to(model.resolve()):
        raise CheckpointError(f"{target} lies inside the model that is read, {model}: choose another folder")
    needed = sum(path.stat().st_size for path in model.rglob("*") if path.is_file())
    free = files.free_bytes(target)
    if needed > free:
        raise CheckpointError(f"no room in {target.parent}: the model takes {needed:,} bytes, {free:,} are free")


def _convert(source: Path, target: Path, dtype: str) -> None:
    """One file of a model folder with its weights, or what its configuration says of them, as ``dtype``."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    from verl.engines.saved_model import clean_config, converted

    kind: torch.dtype = getattr(torch, dtype)
    if source.name == "config.json":
        config = json.loads(source.read_text(encoding="utf-8"))
        if "quantization_config" in config:
            raise CheckpointError(f"{source.parent} is a quantized model: its weights can't be converted to {dtype}")
        files.write_json(target, {"dtype": dtype, **clean_config(config, kind)})
    elif source.suffix == ".safetensors":
        with safe_open(source, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
            save_file(converted(tensors, kind), target, metadata=file.metadata())
    elif source.suffix in (".bin", ".pt", ".pth"):
        raise CheckpointError(f"{source} isn't in safetensors format: its type can't be changed to {dtype}")
    else:
        shutil.copyfile(source, target)


def _fix_index(folder: Path) -> None:
    """The index of a model in several files gives the bytes of all tensors, which a conversion changes."""
    if not (folder / _INDEX).exists():
        return
    from safetensors import safe_open

    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            total += sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    index.setdefault("metadata", {})["total_size"] = total
    files.write_json(folder / _INDEX, index)


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".")
