"""The reward model that a run names: checked before a model is loaded, loaded when the run starts.

A folder that a reward-model run wrote holds the tokenizer of its policy. Where that is the tokenizer of the policy in
training too, the very ids that were sampled are scored, the token that ended the response with them: what the reward
model was trained on. With another tokenizer it reads text, as any classifier of the field does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from verl.common.errors import DataError, UnsupportedModel
from verl.controller import Controller, ResourcePool
from verl.models.lora import is_classifier, root_of
from verl.rewards.base import RewardItem
from verl.trainer.reward_model import RewardModel, load_classifier
from verl.trainer.reward_worker import RemoteRewardModel, RewardWorker


class NamedRewardModel:
    """The reward model in the folder, or of the hub name, ``where``.

    tokenizer  the policy's
    device     of this process, for ``load``; None where it is to be started on workers
    Raises DataError where there is no model, UnsupportedModel where it isn't one of one label.
    """

    def __init__(self, where: str, tokenizer: PreTrainedTokenizerBase, device: torch.device | None) -> None:
        folder = Path(where).expanduser()
        if not folder.is_dir() and (where.startswith((".", "/", "~")) or where.count("/") > 1):
            raise DataError(f"reward.model={where!r} is no folder, and no name on the hub either")
        self.where, self.device = str(folder.absolute()) if folder.is_dir() else where, device
        try:
            config = AutoConfig.from_pretrained(root_of(self.where))
        except (OSError, ValueError) as error:
            raise DataError(f"reward.model={where!r} holds no model: {error}") from error
        kinds: Sequence[str] = config.architectures or []
        is_one = config.num_labels == 1 and any("SequenceClassification" in kind for kind in kinds)
        if not (is_one or is_classifier(Path(self.where))):
            raise UnsupportedModel(
                f"reward.model={where!r} is a {', '.join(kinds) or config.model_type} of {config.num_labels} labels, "
                "not a sequence classifier of one: train one with algorithm.name=bradley_terry"
            )
        self._text_tokenizer = _other_tokenizer(self.where, tokenizer)
        self._model: RewardModel | RemoteRewardModel | None = None

    def load(self) -> None:
        """Load the weights, unless workers do. Raises UnsupportedModel where they lack the head."""
        if self._model is None and self.device is not None:
            self._model = RewardModel(
                load_classifier(self.where, self.device), self._text_tokenizer, device=self.device
            )

    def start_on(self, controller: Controller, pool: ResourcePool) -> None:
        """Load the weights on the workers of ``pool``. Raises as ``load``, and WorkerError."""
        keys: dict[str, Any] = {"where": self.where, "tokenizer": self._text_tokenizer}
        self._model = RemoteRewardModel(controller.group("reward", RewardWorker, pool, **keys))

    def score_items(self, items: Sequence[RewardItem]) -> Sequence[Any]:
        """One score an item, in order."""
        self.load()
        assert self._model is not None, "its workers are started first"
        return self._model.score_items(items)


def _other_tokenizer(where: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase | None:
    """The tokenizer in ``where``; None where it has the ids of ``tokenizer``, or where there is none."""
    try:
        own: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(where)
    except (OSError, ValueError):  # a folder without one
        return None
    return None if own.get_vocab() == tokenizer.get_vocab() else own
