from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.tiny import tiny_model
from verl.common.errors import CheckpointError, ConfigError, DataError, MissingExtra
from verl.models import lora
from verl.models.attention import PackedAttention
from verl.models.causal_lm import CausalLM
from verl.models.loading import ModelConfig, load_model
from verl.models.lora import LoraConfig, add_adapter, has_adapter, merge_adapter, save_adapter, without_adapter
from verl.models.precision import cast_parameters

peft = pytest.importorskip("peft")
IDS = torch.arange(7, 15)[None]
CPU = torch.device("cpu")
FAMILIES = ["llama", "gpt2", "phi3", "gemma2", "qwen3_moe"]


def adapted(family: str = "llama", seed: int = 0, **keys: object) -> PreTrainedModel:
    """A tiny model with an adapter that has learnt something."""
    module = tiny_model(family)
    add_adapter(module, LoraConfig(**{"rank": 2, "alpha": 4.0, **keys}), base="nowhere", seed=seed)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module


def trained(module: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def difference(a: PreTrainedModel, b: PreTrainedModel) -> float:
    return float((a(IDS).logits - b(IDS).logits).detach().abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_adapter_changes_nothing_and_alone_learns(family: str) -> None:
    base, module = tiny_model(family), tiny_model(family)
    kind, before = type(module), {name for name, _ in module.named_parameters()}
    add_adapter(module, LoraConfig(rank=2), base="nowhere", seed=0)
    assert torch.equal(module(IDS).logits, base(IDS).logits)
    assert type(module) is kind
    assert all(".lora_A." in name or ".lora_B." in name for name in trained(module))
    frozen = {name.replace(".base_layer.", ".") for name, p in module.named_parameters() if not p.requires_grad}
    assert frozen == before


@pytest.mark.parametrize("family", FAMILIES)
def test_without_the_adapter_it_is_the_base(family: str) -> None:
    base, module = tiny_model(family), adapted(family)
    assert difference(module, base) > 0.1
    with without_adapter(module):
        assert torch.equal(module(IDS).logits, base(IDS).logits)
        assert all(p.requires_grad for name, p in module.named_parameters() if ".lora_" in name)
    assert difference(module, base) > 0.1


def test_the_adapter_is_back_after_an_error() -> None:
    base, module = tiny_model("llama"), adapted()
    with pytest.raises(ZeroDivisionError), without_adapter(module):
        raise ZeroDivisionError
    assert difference(module, base) > 0.1


def test_packed_rows_run_base_and_adapter_together() -> None:
    module = adapted()
    own = module(IDS).logits[0]
    lm = CausalLM(module)
    positions = torch.arange(IDS.shape[1]).repeat(2)
    attention = PackedAttention(torch.tensor([IDS.shape[1]] * 2), CPU)
    logits = lm.logits(lm.hidden(IDS[0].repeat(2), positions, attention))
    torch.testing.assert_close(logits, own.repeat(2, 1), atol=1e-4, rtol=0)


def test_merged_weight_by_hand(tmp_path: Path) -> None:
    """H13: W + alpha / rank * B A, with rank 1, alpha 2, A = [1 2] and B = [3; 4]."""
    shape = {"hidden_size": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}
    module = tiny_model("llama", shape=shape)
    add_adapter(module, LoraConfig(rank=1, alpha=2.0, target_modules=["v_proj"]), base="nowhere", seed=0)
    layer = module.model.layers[0].self_attn.v_proj
    with torch.no_grad():
        layer.lora_A["default"].weight.copy_(torch.tensor([[1.0, 2.0]]))
        layer.lora_B["default"].weight.copy_(torch.tensor([[3.0], [4.0]]))
    save_adapter(tmp_path, module, trained(module))
    base = tiny_model("llama", shape=shape)
    merged = merge_adapter(copy.deepcopy(base), tmp_path)
    expected = base.model.layers[0].self_attn.v_proj.weight + torch.tensor([[6.0, 12.0], [8.0, 16.0]])
    assert torch.equal(merged.model.layers[0].self_attn.v_proj.weight, expected)
    assert torch.equal(merged.model.layers[1].self_attn.v_proj.weight, base.model.layers[1].self_attn.v_proj.weight)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_adapter_is_peft_s_own_and_merges_without_a_trace(family: str, tmp_path: Path) -> None:
    module = adapted(family)
    save_adapter(tmp_path / "adapter", module, trained(module))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of peft's use of transformers
        theirs = peft.PeftModel.from_pretrained(tiny_model(family), tmp_path / "adapter")
    assert difference(theirs, module) < 1e-5
    merged = merge_adapter(tiny_model(family), tmp_path / "adapter")
    assert difference(merged, module) < 1e-4
    assert all(p.requires_grad for p in merged.parameters())
    merged.save_pretrained(tmp_path / "merged")
    names = load_file(tmp_path / "merged" / "model.safetensors").keys()
    assert not [name for name in names if "lora_" in name or "base_layer" in name or "base_model" in name]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    assert difference(plain, module) < 1e-4


def test_half_precision_is_summed_in_float32(tmp_path: Path) -> None:
    module = adapted(rank=4)
    save_adapter(tmp_path, module, trained(module))
    base = tiny_model("llama")
    cast_parameters(base, torch.bfloat16)
    whole = merge_adapter(tiny_model("llama").bfloat16().float(), tmp_path)
    merged = merge_adapter(base, tmp_path)
    assert torch.equal(merged.model.rotary_emb.inv_freq, tiny_model("llama").model.rotary_emb.inv_freq)
    for name, tensor in merged.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name].bfloat16()), name


def test_an_adapter_s_folder_loads_as_the_merged_model(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "base")
    module = tiny_model("llama")
    add_adapter(module, LoraConfig(rank=2), base=str(tmp_path / "base"), seed=0)
    with torch.no_grad():
        module.model.layers[0].mlp.up_proj.lora_B["default"].weight.fill_(0.2)
    save_adapter(tmp_path / "adapter", module, trained(module))
    config = ModelConfig(path=str(tmp_path / "adapter"), tokenizer="chars:ab")
    loaded = load_model(config, None, CPU, torch.float32)  # type: ignore[arg-type]  # a path needs no tokenizer
    assert not has_adapter(loaded)
    assert difference(loaded, module) < 1e-4


def test_an_adapter_on_a_base_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    whole = tiny_model("llama")
    kept = {name: tensor for name, tensor in whole.state_dict().items() if name != "lm_head.weight"}
    whole.save_pretrained(tmp_path / "base", state_dict=kept)
    module = tiny_model("llama")
    add_adapter(module, LoraConfig(rank=2), base=str(tmp_path / "base"), seed=0)
    save_adapter(tmp_path / "adapter", module, trained(module))
    config = ModelConfig(path=str(tmp_path / "adapter"), tokenizer="chars:ab")
    with pytest.raises(DataError, match=r"model\.path='.*adapter'.* weights in '.*base' lack lm_head\.weight"):
        load_model(config, None, CPU, torch.float32)  # type: ignore[arg-type]  # a path needs no tokenizer


def test_the_base_is_found_beside_an_adapter_that_was_moved(tmp_path: Path) -> None:
    module = adapted()
    tiny_model("llama").save_pretrained(tmp_path / "run" / "base")
    module.peft_config["default"].base_model_name_or_path = "/no/such/run/base"
    folder = tmp_path / "run" / "checkpoints" / "step_000001" / "actor" / "model"
    save_adapter(folder, module, trained(module))
    assert lora.base_of(folder) == str(tmp_path / "run" / "base")
    assert lora.base_of(tmp_path) is None


def test_an_adapter_that_names_no_base(tmp_path: Path) -> None:
    module = adapted()
    module.peft_config["default"].base_model_name_or_path = None
    save_adapter(tmp_path, module, trained(module))
    with pytest.raises(CheckpointError, match="which model"):
        lora.base_of(tmp_path)


def test_an_adapter_of_another_model(tmp_path: Path) -> None:
    module = adapted("llama")
    save_adapter(tmp_path, module, trained(module))
    with pytest.raises(CheckpointError, match="doesn't fit"):
        merge_adapter(tiny_model("llama", shape={"num_hidden_layers": 3}), tmp_path)
    with pytest.raises(CheckpointError, match="doesn't fit"):
        merge_adapter(tiny_model("gpt2"), tmp_path)


TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    "keys",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ],
)
@pytest.mark.filterwarnings("ignore")  # peft warns of tied weights itself
def test_an_adapter_of_one_use_of_a_tied_weight_is_refused(keys: dict[str, list[str]], tmp_path: Path) -> None:
    """Merged, the other use would change too: another model than the one that was trained."""
    with torch.random.fork_rng():
        made = peft.get_peft_model(tiny_model("llama", shape=TIED), peft.LoraConfig(task_type="CAUSAL_LM", **keys))
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1 * parameter.requires_grad)
        made.save_pretrained(tmp_path, save_embedding_layers=False)
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        merge_adapter(tiny_model("llama", shape=TIED), tmp_path)
    merged = merge_adapter(tiny_model("llama"), tmp_path)  # weights of their own: nothing is shared
    assert merged.lm_head.weight is not merged.model.embed_tokens.weight


def test_a_tied_weight_saved_at_both_its_places_is_one(tmp_path: Path) -> None:
    module = tiny_model("llama", shape=TIED)
    add_adapter(module, LoraConfig(rank=2), base="nowhere", seed=0)
    weight = module.lm_head.weight.detach() + 1
    saved = {**trained(module), "lm_head.weight": weight, "model.embed_tokens.weight": weight.clone()}
    save_adapter(tmp_path, module, saved)
    assert torch.equal(merge_adapter(tiny_model("llama", shape=TIED), tmp_path).lm_head.weight, weight)


def test_names_that_the_model_lacks_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"model.lora.target_modules names 'query'; .* q_proj"):
        add_adapter(tiny_model("llama"), LoraConfig(rank=2, target_modules=["query"]), base="nowhere", seed=0)
    with pytest.raises(ConfigError, match="'lm_head'"):
        add_adapter(
            tiny_model("llama"), LoraConfig(rank=2, target_modules=["q_proj", "lm_head"]), base="nowhere", seed=0
        )


def test_one_adapter_only() -> None:
    with pytest.raises(ConfigError, match="has an adapter in it already"):
        add_adapter(adapted(), LoraConfig(rank=2), base="nowhere", seed=0)


def test_chosen_layers_get_one() -> None:
    module = adapted(target_modules=["q_proj", "down_proj"])
    assert {name.split(".")[-4] for name in trained(module)} == {"q_proj", "down_proj"}


def test_the_first_values_follow_from_the_seed_alone() -> None:
    torch.manual_seed(5)
    first = trained(adapted(seed=3))
    torch.manual_seed(6)
    again, other = trained(adapted(seed=3)), trained(adapted(seed=4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"dropout": 0.1}, "unknown key 'dropout'"),
        ({"target_modules": []}, "names no layer"),
        ({"rank": 0}, "greater than or equal to 1"),
        ({"alpha": 0}, "greater than 0"),
    ],
)
def test_keys_that_are_refused(keys: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LoraConfig.parse(keys, "model.lora")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'verl\[lora\]'"):
        add_adapter(tiny_model("llama"), LoraConfig(rank=2), base="nowhere", seed=0)
