from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.tiny import FAMILIES, tiny_folder, tiny_model, word_tokenizer
from verl.common.errors import ConfigError, DataError, UnsupportedModel
from verl.common.seeding import seed_everything
from verl.models.causal_lm import CausalLM
from verl.models.loading import (
    ModelConfig,
    character_tokenizer,
    compute_dtype,
    eos_token_ids,
    load_model,
    load_model_config,
    load_tokenizer,
    position_limits,
)

CPU = torch.device("cpu")
SCRATCH = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}


@pytest.mark.parametrize("text", ["1+2=3", "===", "0", "9876543210+="])
def test_characters_round_trip(text: str) -> None:
    tokenizer = character_tokenizer("0123456789+=")
    ids = tokenizer(text)["input_ids"]
    assert ids == [2 + "0123456789+=".index(c) for c in text]
    assert tokenizer.decode(ids) == text
    assert tokenizer.batch_decode([ids, [*ids, 1, 0]], skip_special_tokens=True) == [text, text]


def test_spaces_newlines_and_letters_are_characters_too() -> None:
    tokenizer = character_tokenizer("ab \n\té字")
    text = "a b\n\té字 b"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 9)


@pytest.mark.parametrize("text", ["\n\n", "a\n\n\nb", "\r\n", "a\r\n\r\n", "\x0b\x0c"])
def test_line_ends_beside_each_other_are_characters_each(text: str) -> None:
    characters = "ab\n\r\x0b\x0c"
    assert character_tokenizer(characters)(text)["input_ids"] == [2 + characters.index(c) for c in text]


@pytest.mark.parametrize("characters", ["", "aa", "0120"])
def test_characters_must_be_distinct(characters: str) -> None:
    with pytest.raises(ConfigError, match="distinct characters"):
        load_tokenizer(ModelConfig(scratch=SCRATCH, tokenizer=f"chars:{characters}"))


def test_a_character_tokenizer_is_saved_and_loaded(tmp_path: Path) -> None:
    character_tokenizer("01+ =").save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelConfig(scratch=SCRATCH, tokenizer=str(tmp_path)))
    assert loaded("1 + 0=")["input_ids"] == character_tokenizer("01+ =")("1 + 0=")["input_ids"]
    assert loaded.eos_token_id == 1


def test_a_folder(tmp_path: Path) -> None:
    config = ModelConfig(path=str(tiny_folder(tmp_path, "gpt2")))
    tokenizer = load_tokenizer(config)
    model = load_model(config, tokenizer, CPU, torch.float32)
    expected = tiny_model("gpt2").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert load_model(config, tokenizer, CPU, torch.bfloat16).dtype == torch.bfloat16


def test_a_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    tiny_folder(tmp_path / "model")
    config = ModelConfig(path="~/model")
    assert load_model(config, load_tokenizer(config), CPU, torch.float32).config.model_type == "llama"


def test_scratch_weights_follow_from_the_seed_and_fit_the_tokenizer() -> None:
    config, tokenizer = ModelConfig(scratch=SCRATCH, tokenizer="chars:01"), character_tokenizer("01")
    made = []
    for seed in (1, 1, 2):
        seed_everything(seed)
        made.append(load_model(config, tokenizer, CPU, torch.float32))
    first, second, third = (m.transformer.wte.weight for m in made)
    assert torch.equal(first, second) and not torch.equal(first, third)
    assert made[0].config.vocab_size == 4 and made[0].config.eos_token_id == 1


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def short_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def lose(folder: Path, *names: str) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name not in names}
    save_file(tensors, path, metadata={"format": "pt"})


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def unknown_kind(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))


def wrong_size(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 48}))


@pytest.mark.parametrize("damage", [no_weights, short_weights, broken_config, unknown_kind, wrong_size])
def test_damaged_folders_are_named(tmp_path: Path, damage: Any) -> None:
    folder = tiny_folder(tmp_path)
    damage(folder)
    with pytest.raises(DataError, match=r"model\.path='.*' doesn't load as a causal language model: \w+"):
        load_model(ModelConfig(path=str(folder)), word_tokenizer(), CPU, torch.float32)


def test_a_folder_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    lose(folder, "model.layers.1.mlp.down_proj.weight")
    with pytest.raises(
        DataError, match=r"model\.path='.*lack model\.layers\.1\.mlp\.down_proj\.weight, which"
    ) as caught:
        load_model(ModelConfig(path=str(folder)), word_tokenizer(), CPU, torch.float32)
    assert "DataError" not in str(caught.value)


def test_a_reward_model_is_no_causal_language_model(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **{**FAMILIES["llama"], "num_labels": 1, "pad_token_id": 0})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"model\.path='.*lack lm_head\.weight, which"):
        load_model(ModelConfig(path=str(tmp_path)), word_tokenizer(), CPU, torch.float32)


def test_weights_that_are_no_numbers_are_traced_to_their_folder(tmp_path: Path) -> None:
    path = tiny_folder(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    module = load_model(ModelConfig(path=str(tmp_path)), word_tokenizer(), CPU, torch.float32)
    with pytest.raises(UnsupportedModel, match=rf"no finite numbers: .* model\.path \(read from '{tmp_path}'\)"):
        CausalLM(module)


@pytest.mark.parametrize("path", ["./nowhere", "/no/where", "~/no/where/at/all"])
def test_no_folder(path: str) -> None:
    for load in (load_tokenizer, lambda config: load_model_config(config, word_tokenizer())):
        with pytest.raises(DataError, match="is no folder"):
            load(ModelConfig(path=path))


@pytest.mark.parametrize("path", ["runs/sft/checkpoints/step_000060/actor/model", "a/b/c"])
def test_what_has_two_slashes_is_never_asked_of_the_hub(path: str) -> None:
    for load in (load_tokenizer, lambda config: load_model_config(config, word_tokenizer())):
        with pytest.raises(DataError, match=rf"model\.path='{path}' is no folder here, and no hub name either"):
            load(ModelConfig(path=path))


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(DataError, match="is no folder"):
        load_tokenizer(ModelConfig(path=str(tmp_path / "model.bin")))


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"(?s)model\.path=.* holds no tokenizer.*Set model\.tokenizer"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))
    config = ModelConfig(path=str(tmp_path), tokenizer=str(tmp_path))
    with pytest.raises(DataError, match=r"model\.tokenizer="):
        load_tokenizer(config)


@pytest.mark.parametrize("place", ["model", "actor/model", "checkpoints/step_000012/actor/model"])
def test_a_folder_with_a_model_below_it_is_told_so(tmp_path: Path, place: str) -> None:
    if place.startswith("checkpoints"):
        tiny_folder(tmp_path / "checkpoints/step_000004/actor/model")
    tiny_folder(tmp_path / place)
    for load in (load_tokenizer, load_model_config_of):
        with pytest.raises(DataError, match=rf"no model folder itself; there is one below it: '{tmp_path / place}'"):
            load(ModelConfig(path=str(tmp_path)))


def load_model_config_of(config: ModelConfig) -> object:
    return load_model_config(config, word_tokenizer())


def test_a_tokenizer_without_an_end(tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(DataError, match="no end-of-sequence token"):
        load_tokenizer(ModelConfig(scratch=SCRATCH, tokenizer=str(tmp_path)))


@pytest.mark.parametrize(
    ("scratch", "words"),
    [
        ({"model_type": "no_such"}, "'no_such'"),
        ({**SCRATCH, "n_embd": 7}, "'gpt2'"),
        ({**SCRATCH, "n_embd": "wide"}, "'gpt2'"),
    ],
)
def test_wrong_descriptions(scratch: dict[str, Any], words: str) -> None:
    config = ModelConfig(scratch=scratch, tokenizer="chars:01")
    with pytest.raises(ConfigError, match=r"model\.scratch doesn't describe") as caught:
        load_model(config, load_tokenizer(config), CPU, torch.float32)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "exactly one of model.path and model.scratch"),
        ({"path": "a", "scratch": SCRATCH, "tokenizer": "chars:01"}, "exactly one"),
        ({"scratch": SCRATCH}, "model.scratch needs model.tokenizer"),
        ({"scratch": {"hidden_size": 3}, "tokenizer": "chars:01"}, "model_type"),
        ({"path": "a", "amp_dtype": "fp8"}, "amp_dtype"),
    ],
)
def test_keys_that_do_not_fit(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ModelConfig.parse(keys)


def test_every_end_id_counts_and_nothing_else_of_the_generation_config() -> None:
    model, tokenizer = tiny_model("llama"), word_tokenizer()
    assert eos_token_ids(model, tokenizer) == (2,)
    model.generation_config.eos_token_id = [9, 2]
    model.config.eos_token_id = 7
    assert eos_token_ids(model, tokenizer) == (2, 7, 9)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    assert eos_token_ids(model, tokenizer) == (2,)


def test_position_limits() -> None:
    assert position_limits(tiny_model("gpt2").config) == {"max_position_embeddings": 256}
    config = AutoConfig.for_model("llama", max_position_embeddings=99)
    assert position_limits(config) == {"max_position_embeddings": 99}


def test_compute_types(caplog: pytest.LogCaptureFixture) -> None:
    cuda = torch.device("cuda")
    assert compute_dtype("auto", CPU) == torch.float32 and compute_dtype("auto", cuda) == torch.bfloat16
    assert compute_dtype("float32", cuda) == torch.float32 and not caplog.records
    with caplog.at_level(logging.WARNING):
        assert compute_dtype("bfloat16", CPU) == torch.bfloat16
    assert "slower than float32" in caplog.text
