import pytest
import torch

from tests.algorithms.rows import NAN, make_batch, near
from verl.algorithms.outcome import group_relative, groups_of, over_tokens, read_outcome, write_outcome
from verl.common.errors import MissingField


def test_a_number_a_row_on_its_sampled_tokens():
    mask = torch.tensor([[True, False, True], [False, False, False]])
    spread = over_tokens(torch.tensor([0.5, NAN], dtype=torch.float64), mask)
    assert spread.dtype == torch.float32 and spread.tolist() == [[0.5, 0, 0.5], [0, 0, 0]]


def test_read_and_write():
    batch = make_batch([2, 1, 0], [1, 0, NAN], groups=[7, 7, 8], masked=[(0, 0)])
    outcome = read_outcome(batch, None)
    near(group_relative(outcome.groups, False), [0.5, -0.5, 0])
    near(group_relative(outcome.groups, True), [0.5**0.5, -(0.5**0.5), 0])
    metrics = write_outcome(batch, outcome, torch.tensor([3.0, -1.0, 5.0]))
    assert batch["advantages"].tolist() == batch["returns"].tolist() == [0, 3, -1]
    assert batch["token_rewards"].tolist() == [0, 1, 0]
    assert metrics["algorithm/rows_excluded"] == 1 and metrics["algorithm/groups_empty_frac"] == 0.5
    assert metrics["algorithm/advantages/mean"] == 1


def test_groups_of_other_scores():
    batch = make_batch([1, 1], [1, 0], groups=[0, 0])
    outcome = read_outcome(batch, None)
    near(groups_of(batch, outcome.credit, torch.tensor([4.0, 2.0])).centred, [1, -1])


def test_a_batch_without_groups_is_refused():
    with pytest.raises(MissingField, match="group_id"):
        read_outcome(make_batch([1], [1], groups=[]), None)
