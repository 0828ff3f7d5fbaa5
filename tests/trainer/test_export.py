import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import tiny_folder, tiny_model, word_tokenizer
from verl.common.errors import CheckpointError, ConfigError
from verl.engines.saved_model import save_model
from verl.models.causal_lm import CausalLM
from verl.models.networks import ScoreNetwork
from verl.trainer.checkpoint import CheckpointStore
from verl.trainer.export import export_checkpoint
from verl.trainer.reward_model import RewardModel


def run_folder(folder: Path, steps: tuple[int, ...] = (2, 4)) -> Path:
    store = CheckpointStore(folder)
    for step in steps:
        model = tiny_model("llama", seed=step)
        parts = {f"{role}/model": lambda f, m=model: save_model(f, m, word_tokenizer()) for role in ("actor", "critic")}
        store.save(step, parts, {})
    return folder


def embedding(folder: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight


def of_step(step: int) -> torch.Tensor:
    return tiny_model("llama", seed=step).get_input_embeddings().weight


def test_run_folder_gives_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    out = export_checkpoint(run, tmp_path / "a")
    assert torch.equal(embedding(out), of_step(4))
    assert AutoTokenizer.from_pretrained(out).chat_template == word_tokenizer().chat_template
    assert not (out / "manifest.json").exists()
    assert torch.equal(embedding(export_checkpoint(run / "checkpoints", tmp_path / "b")), of_step(4))
    (run / "checkpoints/step_000004/critic/model/config.json").unlink()
    assert torch.equal(embedding(export_checkpoint(run, tmp_path / "c")), of_step(2))
    with pytest.raises(CheckpointError, match=r"step_000004 is no complete checkpoint.*config.json is missing"):
        export_checkpoint(run / "checkpoints/step_000004", tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_step_folder_model_folder_and_role(tmp_path: Path) -> None:
    step = run_folder(tmp_path / "run") / "checkpoints/step_000002"
    assert torch.equal(embedding(export_checkpoint(step, tmp_path / "a")), of_step(2))
    assert torch.equal(embedding(export_checkpoint(step, tmp_path / "b", role="critic")), of_step(2))
    assert torch.equal(embedding(export_checkpoint(step / "actor/model", tmp_path / "c")), of_step(2))
    with pytest.raises(CheckpointError, match=r"no part 'judge/model'.*actor/model, critic/model"):
        export_checkpoint(step, tmp_path / "d", role="judge")


def test_of_a_run_that_trained_a_reward_model_that_is_exported(tmp_path: Path) -> None:
    network = ScoreNetwork(CausalLM(tiny_model("llama")))
    with torch.no_grad():
        network.module.score.weight.fill_(0.5)
    parts = {"reward_model/model": lambda folder: save_model(folder, network.module, word_tokenizer())}
    CheckpointStore(tmp_path / "run").save(3, parts, {})
    out = export_checkpoint(tmp_path / "run", tmp_path / "a")
    network.module.set_attn_implementation("eager")
    scores = [RewardModel(folder, device="cpu").score([[1, 5, 7]]) for folder in (out, network.module)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-5) and scores[0] != [0.0]


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", torch.bfloat16), ("fp16", torch.float16)])
def test_dtype(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    out = export_checkpoint(run_folder(tmp_path / "run", (1,)), tmp_path / "out", dtype=name)
    assert {t.dtype for t in load_file(out / "model.safetensors").values()} == {dtype}
    assert json.loads((out / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert torch.equal(loaded.get_input_embeddings().weight, of_step(1).to(dtype))


def test_several_weight_files(tmp_path: Path) -> None:
    source, model = tmp_path / "model", tiny_model("llama", seed=5)
    model.save_pretrained(source, max_shard_size="8KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    out = export_checkpoint(source, tmp_path / "out", dtype="bfloat16")
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(torch.bfloat16))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.numel() for p in model.parameters()) * 2


def test_target_must_be_new_or_empty(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "model")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes").write_text("mine")
    for target in ("full", "full/notes"):
        with pytest.raises(CheckpointError, match="isn't an empty folder"):
            export_checkpoint(source, tmp_path / target)
    assert (tmp_path / "full/notes").read_text() == "mine"
    with pytest.raises(CheckpointError, match="lies inside the model"):
        export_checkpoint(source, source / "out")
    (tmp_path / "empty").mkdir()
    assert (export_checkpoint(source, tmp_path / "empty") / "config.json").exists()
    assert (export_checkpoint(source, tmp_path / "deep/er") / "config.json").exists()


def test_sources_and_types_that_do_not_work(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no folder"):
        export_checkpoint(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "blank").mkdir()
    with pytest.raises(CheckpointError, match=r"is no run folder .* no checkpoint .* and no model"):
        export_checkpoint(tmp_path / "blank", tmp_path / "out")
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="holds no complete checkpoint yet"):
        export_checkpoint(tmp_path / "run", tmp_path / "out")
    source = tiny_folder(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"bfloat16.*got 'bfloat15'; did you mean 'bfloat16'"):
        export_checkpoint(source, tmp_path / "out", dtype="bfloat15")
    assert not (tmp_path / "out").exists()


def test_whole_or_absent(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "model")
    (source / "extra.bin").write_bytes(b"weights of another format")
    with pytest.raises(CheckpointError, match="isn't in safetensors format"):
        export_checkpoint(source, tmp_path / "out", dtype="bfloat16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
    (source / "extra.bin").unlink()
    (source / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(Exception, match="header"):
        export_checkpoint(source, tmp_path / "out", dtype="bfloat16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(CheckpointError, match="quantized"):
        export_checkpoint(source, tmp_path / "out", dtype="bfloat16")
