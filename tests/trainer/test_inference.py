from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rollout.engines import greedy, response_log_probs
from tests.tiny import tiny_folder, tiny_model
from tests.trainer.rewards import row_number
from tests.trainer.runs import REWARDS, write_jsonl
from verl.common.errors import ConfigError, DataError
from verl.rewards.config import RewardConfig
from verl.rollout.base import SamplingParams
from verl.trainer.inference import (
    Sampler,
    data_config,
    evaluate_model,
    generate_file,
    load_sampler,
    summary_lines,
)


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Sampler:
    return load_sampler(str(tiny_folder(tmp_path_factory.mktemp("model"), "gpt2")), device="cpu")


def generate(
    sampler: Sampler, folder: Path, *, temperature: float = 1.0, samples: int = 2, seed: int = 0, rows: int = 3
) -> list[dict[str, object]]:
    prompts = write_jsonl(folder / "p.jsonl", [{"prompt": f"w{i + 9} w8"} for i in range(rows)])
    sampling = SamplingParams(max_new_tokens=5, temperature=temperature)
    count = generate_file(
        sampler, prompts, folder / "out.jsonl", sampling, num_samples=samples, seed=seed, prompt_key="prompt"
    )
    made = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert count == len(made) == samples * rows
    return made


def test_greedy_and_its_log_probs_are_those_of_a_plain_forward(tmp_path: Path, sampler: Sampler) -> None:
    for row in generate(sampler, tmp_path, temperature=0.0, samples=1):
        assert row["response_ids"] == greedy(tiny_model("gpt2"), row["prompt_ids"], 5)  # type: ignore[arg-type]
        expected = response_log_probs(tiny_model("gpt2"), row["prompt_ids"], row["response_ids"])  # type: ignore
        assert row["log_probs"] == pytest.approx(expected, abs=1e-5)


def test_a_response_follows_from_seed_row_and_sample(tmp_path: Path, sampler: Sampler) -> None:
    base = generate(sampler, tmp_path)
    assert base == generate(sampler, tmp_path) != generate(sampler, tmp_path, seed=1)
    fewer = generate(sampler, tmp_path, rows=2)
    assert [row["response_ids"] for row in fewer] == [row["response_ids"] for row in base[:4]]
    more = generate(sampler, tmp_path, samples=4)
    kept = [row for row in more if row["sample"] in (0, 1)]
    assert [row["response_ids"] for row in kept] == [row["response_ids"] for row in base]


def test_a_failed_generation_leaves_the_old_file(tmp_path: Path, sampler: Sampler) -> None:
    generate(sampler, tmp_path)
    before = (tmp_path / "out.jsonl").read_text()
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"prompt": "w9"}, {"prompt": 3}])
    with pytest.raises(DataError, match=r"bad\.jsonl:2"):
        generate_file(
            sampler, bad, tmp_path / "out.jsonl", SamplingParams(max_new_tokens=2), num_samples=1, seed=0,
            prompt_key="prompt",
        )  # fmt: skip
    assert (tmp_path / "out.jsonl").read_text() == before


@pytest.mark.parametrize(("room", "tokens"), [(2, 254), (1, 255)])
def test_prompts_may_use_the_positions_that_the_response_leaves(sampler: Sampler, room: int, tokens: int) -> None:
    config = data_config(sampler, "p.jsonl", SamplingParams(max_new_tokens=tokens), "prompt", None)
    assert (config.max_prompt_tokens, config.overlong_prompts) == (room, "error")
    with pytest.raises(ConfigError, match="max_new_tokens=256 leaves no room for a prompt: the model has 256"):
        data_config(sampler, "p.jsonl", SamplingParams(max_new_tokens=256), "prompt", None)


def test_wrong_keys_are_config_errors(sampler: Sampler) -> None:
    with pytest.raises(ConfigError, match="max_train_rows"):
        data_config(sampler, "p", SamplingParams(max_new_tokens=2), "prompt", None, max_train_rows=0)
    with pytest.raises(ConfigError, match="prompt_key"):
        data_config(sampler, "p", SamplingParams(max_new_tokens=2), "", None)


@pytest.mark.parametrize("batch_rows", [1, 4, 256])
def test_evaluation_is_a_mean_over_rows(tmp_path: Path, sampler: Sampler, batch_rows: int) -> None:
    assert row_number("3") == 3.0
    rows = [{"prompt": f"w{i + 6}", "ground_truth": str(i)} for i in range(10)]
    data = write_jsonl(tmp_path / "d.jsonl", rows)
    sampling = SamplingParams(max_new_tokens=3, temperature=1.0)
    config = data_config(sampler, str(data), sampling, "prompt", "ground_truth")
    reward = RewardConfig(function=f"{REWARDS}:row_number", workers=0)
    found = evaluate_model(sampler, config, reward, sampling, num_samples=2, seed=3, passing=7, batch_rows=batch_rows)
    assert found.metrics["score/mean"] == 4.5 and found.metrics["pass@1"] == found.metrics["pass@2"] == 0.3
    assert len(found.rows) == 20
    lines = summary_lines(found)
    assert any(line.split() == ["score/mean", "4.5"] for line in lines)


@pytest.mark.parametrize("samples", [0, -1])
def test_no_samples(tmp_path: Path, sampler: Sampler, samples: int) -> None:
    with pytest.raises(ConfigError, match="num_samples must be at least 1"):
        generate_file(
            sampler, tmp_path, tmp_path, SamplingParams(max_new_tokens=1), num_samples=samples, seed=0, prompt_key="p"
        )
