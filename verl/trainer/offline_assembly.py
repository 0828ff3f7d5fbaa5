"""From the sections of an offline run to the objects that its loop uses. Nothing here trains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from verl.common.errors import ConfigError
from verl.data.examples import Answer, Example, ExampleDataset
from verl.data.loader import Loader
from verl.data.mismatch import with_mismatches
from verl.models.loading import load_model_config, load_tokenizer, position_limits
from verl.trainer.inputs import Given, check_vocabulary, loader_of
from verl.trainer.offline_sections import OfflineRun
from verl.trainer.parts import Roles, RunParts
from verl.trainer.roles import build_roles, controller_for, recipe_of
from verl.workers.mismatch import MismatchedKL
from verl.workers.starting_policy import StartingPolicy

log = logging.getLogger(__name__)

LoadExamples = Callable[[Any, PreTrainedTokenizerBase, str, int | None], ExampleDataset]
"""(source, tokenizer, configuration key of the source, most rows) -> examples."""


@dataclass(frozen=True)
class OfflineInputs:
    """What a run needs beside its model, loaded and checked against the model's configuration."""

    tokenizer: PreTrainedTokenizerBase
    train: ExampleDataset
    val: ExampleDataset | None


@dataclass(kw_only=True)
class OfflineParts(RunParts):
    """Everything the offline loop uses.

    starting_policy  where a loss needs it
    """

    train: ExampleDataset
    val: ExampleDataset | None
    loader: Loader[Example]
    starting_policy: StartingPolicy | None = None


def load_offline_inputs(config: OfflineRun, given: Given, load: LoadExamples) -> OfflineInputs:
    """Everything that can be wrong before a model is loaded. Raises ConfigError, DataError, MissingExtra."""
    config.track.check_installed()
    tokenizer = given.tokenizer or load_tokenizer(config.model)
    data = config.data
    train = load(data.train if given.train is None else given.train, tokenizer, "data.train", data.max_train_rows)
    val = None
    if data.val is not None:
        val = load(data.val if given.val is None else given.val, tokenizer, "data.val", data.max_val_rows)
        train = _apart(train, val, is_excluding=data.exclude_val)
    hf_config = given.model.config if given.model is not None else load_model_config(config.model, tokenizer)
    for key, examples in (("train", train), ("val", val)):
        if examples is not None:
            _check_fit(hf_config, config, examples, key)
    return OfflineInputs(tokenizer, train, val)


def assemble_offline(config: OfflineRun, given: Given, load: LoadExamples) -> OfflineParts:
    """Inputs, then the model: the cheap errors first."""
    with controller_for(config, given.model) as controller:
        inputs = load_offline_inputs(config, given, load)
        recipe = recipe_of(config, inputs.tokenizer)
        return _parts(config, inputs, build_roles(config, given.model, recipe, controller))


def _parts(config: OfflineRun, inputs: OfflineInputs, roles: Roles) -> OfflineParts:
    """The roles with what the loop needs besides."""
    actor, train, val = roles.actor, inputs.train, inputs.val
    needs = actor.algorithm.needs
    if "kl_estimate" in needs:
        seed, limit = config.trainer.seed, config.data.max_example_tokens
        train = with_mismatches(train, seed, limit)
        val = None if val is None else with_mismatches(val, seed, limit)
    parts = OfflineParts(
        roles=roles,
        algorithm=actor.algorithm,
        passes=[actor] if "old_log_probs" in needs else [],
        tokenizer=inputs.tokenizer,
        train=train,
        val=val,
        loader=loader_of(config, train),
    )
    if "starting_policy" in needs:
        parts.starting_policy = StartingPolicy(actor.engine, config.trainer.output_dir / "reference")
        parts.passes.append(parts.starting_policy)
        if "kl_estimate" in needs:
            parts.passes.append(MismatchedKL(actor.engine, parts.starting_policy))
    return parts


def answers_in(parts: OfflineParts, steps: int) -> Iterator[Answer]:
    """Every answer that ``steps`` steps and the validations look at."""
    batch = len(parts.loader.batch(0))
    is_whole_epoch = steps * batch >= len(parts.train)
    batches = [parts.train] if is_whole_epoch else [parts.loader.batch(index) for index in range(steps)]
    for examples in [*batches, parts.val or ()]:
        for example in examples:
            yield from example.answers
            if example.mismatched is not None:
                yield example.mismatched


def _apart(train: ExampleDataset, val: ExampleDataset, *, is_excluding: bool) -> ExampleDataset:
    """``train``, less what has a prompt of ``val`` or with a warning of that."""
    if is_excluding:
        return train.without_prompts(val)
    seen = {example.prompt_ids for example in train}
    shared = [example.row_id for example in val if example.prompt_ids in seen]
    if shared:
        log.warning(
            "%d of %d validation examples are to prompts of the training data, such as row %d; data.exclude_val=true "
            "leaves those out of training",
            len(shared),
            len(val),
            shared[0],
        )
    return train


def _check_fit(hf_config: PretrainedConfig, config: OfflineRun, examples: ExampleDataset, key: str) -> None:
    """Raise ConfigError for an answer longer than the model's positions or an id beyond its vocabulary."""
    for example in examples:
        where = f"row {example.row_id} of data.{key} ({example.source})"
        for answer in example.answers:
            check_vocabulary(hf_config, config.model, max(answer.prompt_ids + answer.response_ids), where)
    # a mismatched answer may have the longest prompt and the longest response
    longest = max(len(e.prompt_ids) for e in examples)
    longest += max(len(answer.response_ids) for e in examples for answer in e.answers)
    longest = min(longest, config.data.max_example_tokens)
    for name, limit in position_limits(hf_config).items():
        if longest > limit:
            raise ConfigError(
                f"the longest prompt of data.{key} and its longest answer come to {longest} tokens; the model has "
                f"{limit} positions ({name}). Set data.max_example_tokens to {limit} or less"
            )
