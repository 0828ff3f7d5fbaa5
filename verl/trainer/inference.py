"""Generation and scoring with a model folder, outside a training run: ``verl generate`` and ``verl eval``.

The same data path, rollout engine, rewards and validation as in training, without the loop.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from verl.common.errors import ConfigError, DataError
from verl.common.seeding import derive_seed, seed_everything
from verl.data.config import DataConfig
from verl.data.prompts import OVERLONG_ADVICE, PromptDataset, load_prompts
from verl.models.causal_lm import CausalLM
from verl.models.loading import (
    ModelConfig,
    compute_dtype,
    eos_token_ids,
    load_model,
    load_model_config,
    load_tokenizer,
    position_limits,
)
from verl.rewards.config import RewardConfig
from verl.rewards.runner import RewardRunner
from verl.rollout import ROLLOUT_ENGINES
from verl.rollout.base import Request, RolloutEngine, SamplingParams
from verl.trainer.inputs import check_columns, pick_device
from verl.trainer.output import json_lines, write_output
from verl.trainer.validation import Evaluation, evaluate
from verl.workers.rollout import Rollout

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampler:
    """A model to generate with. Its weights are loaded when its engine is first asked for: the input is read before.

    model  its section
    name   of the rollout engine, which has that engine's defaults
    seed   for what loading draws
    """

    model: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    max_positions: int | None
    name: str
    device: torch.device
    seed: int

    @cached_property
    def engine(self) -> RolloutEngine:
        """Raises ConfigError and DataError where the weights don't load."""
        seed_everything(self.seed)
        dtype = compute_dtype(self.model.amp_dtype, self.device)
        module = load_model(self.model, self.tokenizer, self.device, dtype)
        build = ROLLOUT_ENGINES.load(self.name)
        stops = eos_token_ids(module, self.tokenizer)
        engine: RolloutEngine = build(CausalLM(module), self.tokenizer, build.Config(name=self.name), stops)
        return engine


def load_sampler(
    model: str, *, engine: str = "native", device: str = "auto", amp_dtype: str = "auto", seed: int = 0
) -> Sampler:
    """The model folder ``model`` behind a rollout engine. Raises ConfigError and DataError for what isn't there."""
    disable_progress_bar()  # on standard error, among what a command says
    if not 0 <= seed < 2**63:
        raise ConfigError(f"trainer.seed must be at least 0 and below 2^63, got {seed}")
    config = ModelConfig(path=model, amp_dtype=amp_dtype)
    where = pick_device(device)
    tokenizer = load_tokenizer(config)
    limits = position_limits(load_model_config(config, tokenizer))
    return Sampler(config, tokenizer, min(limits.values(), default=None), engine, where, seed)


def generate_file(
    sampler: Sampler,
    prompts: Path,
    out: Path,
    sampling: SamplingParams,
    *,
    num_samples: int,
    seed: int,
    prompt_key: str,
) -> int:
    """Sample ``num_samples`` responses to each row of ``prompts`` and write them to ``out``, whole or not at all.

    Rows hold row_id, sample, prompt_ids, response_ids, log_probs, finish_reason, text. Returns how many.
    """
    _check_samples(num_samples, sampling)
    dataset = _load(sampler, data_config(sampler, str(prompts), sampling, prompt_key, None))
    requests = [
        Request(prompt_ids=row.prompt_ids, seed=derive_seed(seed, "generate", row.row_id, k), sampling=sampling)
        for row in dataset
        for k in range(num_samples)
    ]
    responses = sampler.engine.generate(requests)
    texts = sampler.tokenizer.batch_decode([r.response_ids for r in responses], skip_special_tokens=True)
    records = []
    for i, (response, text) in enumerate(zip(responses, texts, strict=True)):
        row = dataset[i // num_samples]
        record = {
            "row_id": row.row_id,
            "sample": i % num_samples,
            "prompt_ids": list(row.prompt_ids),
            "response_ids": response.response_ids,
            "log_probs": response.log_probs,
            "finish_reason": response.finish_reason.word,
            "text": text,
        }
        records.append(record)
    write_output(out, "".join(json_lines(records)))
    return len(records)


def evaluate_model(
    sampler: Sampler,
    data: DataConfig,
    reward: RewardConfig,
    sampling: SamplingParams,
    *,
    num_samples: int,
    seed: int,
    passing: float,
    batch_rows: int = 256,
) -> Evaluation:
    """Accuracy and pass@k of the sampler's model on ``data.train``."""
    if not math.isfinite(passing):
        raise ConfigError(f"passing must be a finite number, got {passing}")
    _check_samples(num_samples, sampling)
    dataset = _load(sampler, data)
    with RewardRunner(reward) as rewards:
        rewards.start()
        check_columns(rewards, dataset, "data.train")
        rollout = Rollout(sampler.engine, sampler.tokenizer, sampling, num_samples)
        return evaluate(dataset, rollout, rewards, batch_rows=batch_rows, seed=seed, passing=passing)


def data_config(
    sampler: Sampler, source: str, sampling: SamplingParams, prompt_key: str, ground_truth_key: str | None, **keys: Any
) -> DataConfig:
    """Prompts as long as the model's positions allow beside the response; a longer one is an error that names it."""
    room = (sampler.max_positions or 2**20) - sampling.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt: the model has "
            f"{sampler.max_positions} positions. Lower max_new_tokens"
        )
    return DataConfig.parse(
        {
            "train": source,
            "prompt_key": prompt_key,
            "ground_truth_key": ground_truth_key,
            "max_prompt_tokens": room,
            "overlong_prompts": "error",
            "shuffle": False,
            **keys,
        },
        "data",
    )


def _load(sampler: Sampler, data: DataConfig) -> PromptDataset:
    try:
        return load_prompts(data.train, data, sampler.tokenizer, max_rows=data.max_train_rows)
    except DataError as error:
        if OVERLONG_ADVICE not in str(error):
            raise
        raise DataError(
            f"the model has {sampler.max_positions} positions, and the response may take all but "
            f"{data.max_prompt_tokens} of them. "
            + str(error).replace(OVERLONG_ADVICE, "Lower max_new_tokens, or shorten these prompts:")
        ) from error


def summary_lines(evaluation: Evaluation) -> Sequence[str]:
    """One line a metric, widest keys first aligned."""
    width = max(len(name) for name in evaluation.metrics)
    return [f"{name:<{width}}  {value:.6g}" for name, value in evaluation.metrics.items()]


def _check_samples(count: int, sampling: SamplingParams) -> None:
    if count < 1:
        raise ConfigError(f"num_samples must be at least 1, got {count}")
    if count > 1 and sampling.temperature == 0:
        log.warning("the %d samples of a prompt are equal: temperature is 0. Set it above 0, such as 1", count)
