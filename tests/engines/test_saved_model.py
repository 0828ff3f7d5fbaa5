import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.tiny import FAMILIES, tiny_model, word_tokenizer
from verl.common.errors import CheckpointError
from verl.engines.saved_model import clean_config, converted, save_model
from verl.models.attention import ATTENTION

IDS = torch.tensor([[1, 7, 9, 30]])


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_transformers_loads_what_was_saved(tmp_path: Path, family: str) -> None:
    model = tiny_model(family)
    expected = logits(model)
    model.set_attn_implementation(ATTENTION)
    save_model(tmp_path, model, word_tokenizer())
    assert ATTENTION not in {str(v) for v in json.loads((tmp_path / "config.json").read_text()).values()}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert loaded.config._attn_implementation != ATTENTION
    assert torch.allclose(logits(loaded), expected, atol=1e-5)
    assert model.config._attn_implementation == ATTENTION, "the live model stays as it is"


def test_tokenizer_and_chat_template_are_carried(tmp_path: Path) -> None:
    save_model(tmp_path, tiny_model("llama"), word_tokenizer())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("hi w6").input_ids == [1, 5, 6]
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == "<s> [U] hi [A]"


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_tied_weights_stay_tied(tmp_path: Path, dtype: torch.dtype | None) -> None:
    model = tiny_model("qwen2")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    expected = logits(model)
    save_model(tmp_path, model, dtype=dtype)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    if dtype is None:
        assert torch.equal(logits(loaded), expected)


def test_other_dtype_in_the_files_only(tmp_path: Path) -> None:
    model = tiny_model("llama")
    save_model(tmp_path, model, dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16
    assert model.dtype == torch.float32


@pytest.mark.parametrize("setting", [{"temperature": 0.3}, {"top_p": 0.5, "top_k": 7}, {"max_new_tokens": 5}])
def test_any_generation_config_is_carried(tmp_path: Path, setting: dict[str, float]) -> None:
    model = tiny_model("llama")
    for key, value in setting.items():
        setattr(model.generation_config, key, value)
    before = model.generation_config
    save_model(tmp_path, model)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert {key: saved[key] for key in setting} == setting
    assert model.generation_config is before


def test_conversion_that_overflows_is_refused() -> None:
    assert converted({"x": torch.tensor([1.5, float("inf")])}, torch.float16)["x"].dtype == torch.float16
    with pytest.raises(CheckpointError, match=r"x has values beyond the range of torch.float16"):
        converted({"x": torch.tensor([1e6])}, torch.float16)
    whole = torch.zeros(2, dtype=torch.int64)
    assert converted({"x": whole}, torch.float16)["x"] is whole


def test_clean_config_reaches_every_level() -> None:
    config = {"_attn_implementation": "verl", "text_config": {"attn_implementation": "verl", "dtype": "float32"}}
    config |= {"attn_implementation": {"": "sdpa", "text_config": "verl"}, "vision": {"_attn_implementation": "sdpa"}}
    assert clean_config(config, torch.bfloat16) == {
        "text_config": {"dtype": "bfloat16"},
        "vision": {"_attn_implementation": "sdpa"},
    }
