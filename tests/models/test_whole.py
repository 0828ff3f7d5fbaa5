from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tiny import FAMILIES, tiny_model
from verl.common.errors import DataError
from verl.models.whole import load_whole

LOST = [f"model.layers.{i}.mlp.{name}.weight" for i in (0, 1) for name in ("down_proj", "up_proj")]


def saved(folder: Path, family: str = "llama", *, is_tied: bool = False) -> Path:
    tiny_model(family, shape={"tie_word_embeddings": is_tied}).save_pretrained(folder)
    return folder / "model.safetensors"


def keep(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_model_of_every_family_loads(tmp_path: Path, family: str, is_tied: bool) -> None:
    saved(tmp_path, family, is_tied=is_tied)
    loaded = load_whole(AutoModelForCausalLM, str(tmp_path))
    expected = tiny_model(family, shape={"tie_word_embeddings": is_tied}).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())


@pytest.mark.parametrize("family", FAMILIES)
def test_any_one_weight_may_be_the_missing_one(tmp_path: Path, family: str) -> None:
    path = saved(tmp_path, family)
    tensors = load_file(path)
    for name in [*tensors][:: max(1, len(tensors) // 4)]:
        keep(path, {key: tensor for key, tensor in tensors.items() if key != name})
        # of one expert of several, which are one tensor in memory, transformers itself says it
        with pytest.raises((DataError, RuntimeError), match=r"lack|conversion|mismatch"):
            load_whole(AutoModelForCausalLM, str(tmp_path))


def test_the_first_ones_are_named_and_how_many_more(tmp_path: Path) -> None:
    path = saved(tmp_path)
    keep(path, {name: tensor for name, tensor in load_file(path).items() if name not in LOST})
    with pytest.raises(DataError, match=f"lack {', '.join(LOST[:3])} and 1 more, which would be random") as caught:
        load_whole(AutoModelForCausalLM, str(tmp_path))
    assert repr(str(tmp_path)) in str(caught.value)
    with pytest.raises(DataError, match=f"lack {LOST[3]}, which"):
        load_whole(AutoModelForCausalLM, str(tmp_path), given=LOST[:3])


def test_what_is_there_besides_does_not_matter(tmp_path: Path) -> None:
    path = saved(tmp_path)
    keep(path, {**load_file(path), "score.weight": torch.zeros(1, 32)})
    assert load_whole(AutoModelForCausalLM, str(tmp_path), dtype=torch.bfloat16).dtype == torch.bfloat16
