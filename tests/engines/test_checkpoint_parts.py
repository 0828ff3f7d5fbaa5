import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.tiny import FAMILIES, tiny_model, word_tokenizer
from verl.common.errors import CheckpointError
from verl.engines.checkpoint_parts import (
    clean_config,
    converted,
    load_optimizer,
    save_model,
    save_optimizer,
)
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


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        module(torch.randn(5, 3, generator=generator)).square().sum().backward()
        optimizer.step()


MAKERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_resumed_optimizer_goes_on_bitwise(tmp_path: Path, kind: str) -> None:
    straight = network()
    optimizer = MAKERS[kind](straight.named_parameters())
    train(straight, optimizer, range(3))
    save_optimizer(tmp_path, optimizer)
    resumed = network(1)
    resumed.load_state_dict(straight.state_dict())
    other = MAKERS[kind](resumed.named_parameters())
    load_optimizer(tmp_path, other)
    train(straight, optimizer, range(3, 6))
    train(resumed, other, range(3, 6))
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_state_goes_by_name_not_by_order_or_group(tmp_path: Path) -> None:
    module = network()
    optimizer = MAKERS["adamw"](module.named_parameters())
    train(module, optimizer, range(2))
    save_optimizer(tmp_path, optimizer)
    named = list(module.named_parameters())
    other = torch.optim.AdamW([{"params": named[2:]}, {"params": named[1::-1]}], lr=0.5)
    load_optimizer(tmp_path, other)
    for _, parameter in named:
        assert torch.equal(other.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.1]


def test_loading_over_a_state_that_is_there(tmp_path: Path) -> None:
    module = network()
    optimizer = MAKERS["adamw"](module.named_parameters())
    train(module, optimizer, range(2))
    save_optimizer(tmp_path, optimizer)
    weight = module[0].weight
    moments, expected = optimizer.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg"].clone()
    train(module, optimizer, range(2, 4))
    assert not torch.equal(moments, expected)
    load_optimizer(tmp_path, optimizer)
    assert optimizer.state[weight]["exp_avg"] is moments and torch.equal(moments, expected), "read in place"
    assert optimizer.state[weight]["step"] == 2


def test_fresh_optimizer_clears_what_was_there(tmp_path: Path) -> None:
    module = network()
    save_optimizer(tmp_path, MAKERS["adamw"](module.named_parameters()))
    optimizer = MAKERS["adamw"](module.named_parameters())
    train(module, optimizer, range(1))
    load_optimizer(tmp_path, optimizer)
    assert not optimizer.state


def test_separate_masters(tmp_path: Path) -> None:
    module = network().to(torch.bfloat16)
    masters = {name: nn.Parameter(p.detach().float() + 1e-4) for name, p in module.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=0.1)
    for master in masters.values():
        master.grad = torch.ones_like(master)
    optimizer.step()
    with pytest.raises(CheckpointError, match=r"4 tensors of the optimizer have no name.*parameters"):
        save_optimizer(tmp_path, optimizer)
    save_optimizer(tmp_path, optimizer, {n: m.data for n, m in masters.items()}, parameters=masters)
    fresh = {name: nn.Parameter(torch.zeros_like(m)) for name, m in masters.items()}
    other = torch.optim.AdamW(fresh.values(), lr=0.1)
    load_optimizer(tmp_path, other, {n: m.data for n, m in fresh.items()}, parameters=fresh)
    for name in masters:
        assert torch.equal(fresh[name], masters[name])
        assert torch.equal(other.state[fresh[name]]["exp_avg_sq"], optimizer.state[masters[name]]["exp_avg_sq"])
    with pytest.raises(CheckpointError, match=r"holds 4 masters that the optimizer lacks, such as '0.bias'"):
        load_optimizer(tmp_path, other, parameters=fresh)


def test_other_parameters_are_refused_before_anything_changes(tmp_path: Path) -> None:
    module = network()
    optimizer = MAKERS["adamw"](module.named_parameters())
    train(module, optimizer, range(2))
    save_optimizer(tmp_path, optimizer)
    wider = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    with pytest.raises(CheckpointError, match=r"'0.weight' was \[4, 3\], in this run it is \[5, 3\]"):
        load_optimizer(tmp_path, MAKERS["adamw"](wider.named_parameters()))
    deeper = nn.Sequential(*network(), nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"lacks 2 of the optimizer's parameters, such as '2.bias'"):
        load_optimizer(tmp_path, MAKERS["adamw"](deeper.named_parameters()))
    fewer = MAKERS["adamw"](list(module.named_parameters())[:2])
    with pytest.raises(CheckpointError, match=r"holds 2 parameters that the optimizer lacks, such as '1.bias'"):
        load_optimizer(tmp_path, fewer)
    with pytest.raises(CheckpointError, match="holds no optimizer state"):
        load_optimizer(tmp_path / "elsewhere", optimizer)
    assert not fewer.state


def test_hyperparameters_come_from_the_run_but_for_the_rate(tmp_path: Path, caplog) -> None:
    module = network()
    save_optimizer(tmp_path, torch.optim.AdamW(module.named_parameters(), lr=0.025, weight_decay=0.5))
    optimizer = torch.optim.AdamW(module.named_parameters(), lr=0.1, weight_decay=0.25)
    load_optimizer(tmp_path, optimizer)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.025, 0.25)
    assert [record.message for record in caplog.records] == [
        "the optimizer's weight_decay was 0.5 when it was saved and is 0.25 in this run"
    ]
