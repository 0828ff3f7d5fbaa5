"""A reward model: sequences in, one score each out; local, cached, asynchronous, made to be subclassed.

A sequence is token ids, text or chat messages. Rows run without padding, in batches of rows of one length, so a
row's score doesn't depend on its neighbours or on which id pads. Knows nothing of rollouts, steps or training.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from verl.common.errors import ConfigError, DataError, UnsupportedModel
from verl.models.lora import base_of, is_classifier, load_adapter, load_merged
from verl.models.whole import load_whole
from verl.rewards.base import RewardItem, RewardResult, failed


class RewardModel:
    """Scores with a Hugging Face sequence-classification model of one label; subclass and override ``score``.

    model             a folder or hub name, or a module; None where a subclass scores by itself
    tokenizer         for text and messages; left out, the one in the model's folder, if it has one
    device            where it runs; left out, where the module is, or the GPU if there is one
    max_batch_tokens  tokens of one forward pass; a longer row runs alone
    cache_size        scores kept, by whole sequence; 0 keeps none. Call ``clear_cache`` when the weights change

    Raises UnsupportedModel when the model has another number of labels than one.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        device: str | torch.device | None = None,
        max_batch_tokens: int = 16_384,
        cache_size: int = 65_536,
    ) -> None:
        if max_batch_tokens < 1 or cache_size < 0:
            raise ConfigError(
                f"max_batch_tokens must be >= 1 and cache_size >= 0, got {max_batch_tokens} and {cache_size}"
            )
        if isinstance(model, (str, Path)):
            tokenizer = tokenizer or _tokenizer_in(model)
            device = device or ("cuda" if torch.cuda.is_available() else "cpu")
            model = load_classifier(str(model), torch.device(device))
        self.model, self.tokenizer = model, tokenizer
        self.max_batch_tokens, self.cache_size = max_batch_tokens, cache_size
        self._cache: OrderedDict[bytes, float] = OrderedDict()
        self._lock = threading.RLock()
        self._executor: ThreadPoolExecutor | None = None
        if model is not None:
            _check(model)
            model.to(device)  # type: ignore[arg-type]  # None leaves it where it is
            model.train(False)

    def score(self, sequences: Sequence[Any]) -> list[float]:
        """One score a sequence, in order: token ids (list, tuple or tensor), text, or chat messages.

        Token ids and text hold prompt and response; text that doesn't begin with the tokenizer's own first tokens
        gets them. Raises DataError for an empty sequence or one longer than the model takes.
        """
        rows = [self.encode(sequence) for sequence in sequences]
        with self._lock:
            keys = [array("q", row).tobytes() for row in rows]
            known = {key: self._cache[key] for key in keys if key in self._cache}
            new = {key: row for key, row in zip(keys, rows, strict=True) if key not in known}
            known.update(zip(new, self._forward(list(new.values())), strict=True))
            for key in keys:
                self._remember(key, known[key])
        return [known[key] for key in keys]

    def score_async(self, sequences: Sequence[Any]) -> Future[list[float]]:
        """``score`` in the background, in the order of the calls."""
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="verl-reward-model")
        return self._executor.submit(self.score, list(sequences))

    def score_items(self, items: Sequence[RewardItem]) -> list[float | RewardResult]:
        """What the reward runner calls: prompt and response of each item as one sequence.

        With a tokenizer their text is read (a chat prompt goes through its template), without one their token ids.
        An item that can't be scored is a failure of its own and doesn't disturb the others.
        """
        results: list[float | RewardResult] = [0.0] * len(items)
        sequences: dict[int, Any] = {}
        for i, item in enumerate(items):
            try:
                sequence = self.sequence(item)
                sequences[i] = tuple(self.encode(sequence)) if self.model is not None else sequence
            except DataError as error:
                results[i] = failed("error", str(error))
        scores = self.score(list(sequences.values())) if sequences else []
        for i, score in zip(sequences, scores, strict=True):
            results[i] = float(score)
        return results

    def sequence(self, item: RewardItem) -> Any:
        """Prompt and response of ``item`` as one sequence: text, messages or token ids."""
        if self.tokenizer is None and item.prompt_ids is not None and item.response_ids is not None:
            return (*item.prompt_ids, *item.response_ids)
        if isinstance(item.prompt, str):
            return item.prompt + item.response
        return [*item.prompt, {"role": "assistant", "content": item.response}]

    def encode(self, sequence: Any) -> list[int]:
        """Token ids of a sequence. Raises ConfigError for text without a tokenizer, DataError for a bad length."""
        if isinstance(sequence, torch.Tensor):
            sequence = sequence.tolist()
        if isinstance(sequence, str) or (len(sequence) and isinstance(sequence[0], dict)):
            sequence = self._tokenize(sequence)
        ids = [int(token) for token in sequence]
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) if self.model else None
        if not ids or len(ids) > (limit or math.inf):
            raise DataError(f"a sequence for the reward model must have 1 to {limit} tokens, got {len(ids)}")
        return ids

    def clear_cache(self) -> None:
        """Forget every score: the weights have changed."""
        with self._lock:
            self._cache.clear()

    def _tokenize(self, sequence: Any) -> list[int]:
        if self.tokenizer is None:
            raise ConfigError("the reward model has no tokenizer: pass one, or score token ids")
        if not isinstance(sequence, str):
            if not self.tokenizer.chat_template:
                raise ConfigError("the reward model's tokenizer has no chat template: use plain prompts")
            sequence = self.tokenizer.apply_chat_template(sequence, tokenize=False)
            return list(self.tokenizer(sequence, add_special_tokens=False)["input_ids"])
        has_bos = self.tokenizer.bos_token is not None and sequence.startswith(self.tokenizer.bos_token)
        return list(self.tokenizer(sequence, add_special_tokens=not has_bos)["input_ids"])

    def _forward(self, rows: list[list[int]]) -> list[float]:
        """Scores of token rows, each computed on its own tokens only."""
        if not rows:
            return []
        if self.model is None:
            raise ConfigError("this RewardModel has no model: pass model=..., or override score() without super()")
        scores = [0.0] * len(rows)
        device = next(self.model.parameters()).device
        self.model.train(False)
        with torch.inference_mode():
            for batch in _batches(rows, self.max_batch_tokens):
                for i, score in zip(batch, _logits(self.model, [rows[i] for i in batch], device), strict=True):
                    scores[i] = score
        return scores

    def _remember(self, key: bytes, score: float) -> None:
        self._cache[key] = score
        self._cache.move_to_end(key)
        if len(self._cache) > self.cache_size:
            self._cache.popitem(last=False)


def _batches(rows: Sequence[Sequence[int]], max_tokens: int) -> Iterator[list[int]]:
    """Indices of rows of one length, as many as fit into ``max_tokens``."""
    by_length: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        by_length.setdefault(len(row), []).append(i)
    for length, indices in sorted(by_length.items()):
        size = max(1, max_tokens // length)
        yield from (indices[start : start + size] for start in range(0, len(indices), size))


def _logits(model: PreTrainedModel, rows: list[list[int]], device: torch.device) -> list[float]:
    """The model's one logit for each row; all rows have one length.

    transformers reads the score at the last token that isn't the padding id, which is wrong for a row that ends in
    that id. There is no padding here, so no id may count as padding.
    """
    config = model.config.get_text_config()
    pad_token_id, config.pad_token_id = config.pad_token_id, -1
    try:
        ids = torch.tensor(rows, device=device)
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    finally:
        config.pad_token_id = pad_token_id
    scores: list[float] = output.logits[:, 0].float().tolist()
    return scores


def load_classifier(where: str, device: torch.device) -> PreTrainedModel:
    """A classifier in the checkpoint's own type on a GPU, in float32 on a CPU, still on the CPU; an adapter merged.

    Raises UnsupportedModel when it lacks weights, such as those of a head that scores.
    """
    dtype = torch.float32 if device.type == "cpu" else "auto"
    load = partial(load_whole, AutoModelForSequenceClassification, dtype=dtype)
    try:
        if base_of(Path(where)) is None:
            return load(where)
        if not is_classifier(Path(where)):
            raise UnsupportedModel(f"{where!r} is no reward model: it is an adapter without a head that scores")
        return load_merged(where, partial(load, num_labels=1, given=load_adapter(Path(where))))
    except DataError as error:
        raise UnsupportedModel(f"{where!r} is no reward model: {error}") from error


def _check(model: PreTrainedModel) -> None:
    if getattr(model.config, "num_labels", None) != 1:
        raise UnsupportedModel(
            f"a reward model has one label, {type(model).__name__} has {getattr(model.config, 'num_labels', None)}: "
            "load it with num_labels=1"
        )


def _tokenizer_in(where: str | Path) -> PreTrainedTokenizerBase | None:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(where)
    except (OSError, ValueError):  # a folder without one
        return None
    return tokenizer
