from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from tests.tiny import word_tokenizer
from tests.trainer.test_reward_folder import ITEM, reward_folder
from verl.common.errors import WorkerError
from verl.controller import Controller, ResourcePool
from verl.rewards.base import RewardItem
from verl.rewards.config import RewardConfig
from verl.rewards.runner import RewardRunner
from verl.trainer.reward_folder import NamedRewardModel

UNSENDABLE = {"f": lambda: None}
LONE = RewardItem(prompt="hi", response="w9", row=UNSENDABLE, prompt_ids=[5], response_ids=[9])
EMPTY = RewardItem(prompt="", response="", prompt_ids=[], response_ids=[])


def test_workers_score_as_this_process_does(tmp_path: Path) -> None:
    where, tokenizer = str(reward_folder(tmp_path)), word_tokenizer()
    here = NamedRewardModel(where, tokenizer, torch.device("cpu")).score_items([ITEM, EMPTY, LONE])
    there = NamedRewardModel(where, tokenizer, None)
    there.load()
    with Controller("inprocess") as controller:
        there.start_on(controller, ResourcePool(1, kind="cpu"))
        found = there.score_items([ITEM, EMPTY, LONE])
        assert there.score_items([]) == []
    assert found[0] == pytest.approx(here[0], abs=1e-6) and found[2] == pytest.approx(here[2], abs=1e-6)
    assert found[1].failure == here[1].failure == "error"


def test_a_lost_worker_is_no_failed_row(tmp_path: Path) -> None:
    model, before = NamedRewardModel(str(reward_folder(tmp_path)), word_tokenizer(), None), psutil.Process().children()
    with Controller("processes") as controller:
        model.start_on(controller, ResourcePool(1, kind="cpu"))
        for worker in [child for child in psutil.Process().children() if child not in before]:
            worker.kill()
        with RewardRunner(model, RewardConfig(model="there")) as rewards, pytest.raises(WorkerError, match="SIGKILL"):
            rewards.score([ITEM])
