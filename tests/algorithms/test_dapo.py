import pytest
import torch

from tests.algorithms.rows import NAN, columns_of, limited, make_batch, near
from verl.algorithms.dapo import DAPO, DAPOConfig


def test_by_hand_on_ragged_rows_with_tool_tokens():
    batch = make_batch([1, 3, 2, 1], [1, 0, 0, 0], groups=[4] * 4, masked=[(1, 1), (2, 1)])
    metrics = DAPO(DAPOConfig()).advantages(batch)
    near(batch["advantages"], [1.5, -0.5, 0, -0.5, -0.5, 0, -0.5], 1e-5)
    near(batch["returns"], batch["advantages"])
    assert metrics["algorithm/groups_equal_frac"] == 0


@pytest.mark.parametrize("scores", [[0.0, 0.0], [1.0] * 4, [0.7] * 8, [0.1] * 3, [-2.0] * 5, [0.7, 0.7 + 1e-8]])
def test_a_group_of_equals_is_dropped(scores):
    n = len(scores)
    batch = make_batch([1] * (n + 2), [*scores, 1, 0], groups=[7] * n + [3, 3])
    assert DAPO(DAPOConfig()).keeps(batch).tolist() == [False] * n + [True] * 2


@pytest.mark.parametrize(
    ("scores", "scored", "is_kept"),
    [
        ([1, 0, 0], [True, True, True], True),
        ([1, NAN, 0], [True, True, True], True),
        ([1, 1, 0], [True, True, False], False),
        ([1, NAN, NAN], [True, True, True], False),
        ([1, 0, 1], [False, True, False], False),
        ([1, 0, 1], [False, False, False], False),
    ],
)
def test_only_valid_scores_are_compared(scores, scored, is_kept):
    batch = make_batch([1] * 3, scores, groups=[0] * 3, rows={"is_scored": scored})
    before = batch["response_mask"].clone()
    assert DAPO(DAPOConfig()).keeps(batch).tolist() == [is_kept] * 3
    assert torch.equal(batch["response_mask"], before), "asking changes nothing"


def test_a_given_up_response_is_not_compared():
    batch = make_batch([1] * 3, [1, 1, 0], groups=[0] * 3, rows={"finish_reason": [0, 1, 2]})
    assert not DAPO(DAPOConfig()).keeps(batch).any()


def test_rows_of_a_group_need_not_be_neighbours():
    batch = make_batch([1] * 4, [1, 1, 0, 1], groups=[5, 2, 5, 2])
    assert DAPO(DAPOConfig()).keeps(batch).tolist() == [True, False, True, False]


def test_equal_scores_of_unequal_lengths_are_equal_before_the_overlong_penalty():
    """Length 4 of 4 with a buffer of 2 loses 1, length 2 nothing; the scores given are 1 and 1."""
    algorithm = limited(DAPO(DAPOConfig(overlong={"buffer_tokens": 2})), 4)
    batch = make_batch([4, 2], [1, 1], groups=[0, 0])
    assert not algorithm.keeps(batch).any()
    mixed = make_batch([4, 2], [1, 0], groups=[0, 0])  # 1 - 1 and 0: kept, and equal afterwards
    assert algorithm.keeps(mixed).all()
    algorithm.advantages(mixed)
    assert not mixed["advantages"].any()


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss"), [(0.5, 1.0, -1.28), (-0.5, -1.0, 0.8), (0.2, 1.0, -1.2214)]
)
def test_the_upper_bound_is_the_higher_one(log_ratio, advantage, loss):
    batch = make_batch([1], [1], advantages=[[advantage]], old_log_probs=[[-1.0]])
    columns = columns_of(batch, ["response_mask", "advantages", "old_log_probs"])
    found = DAPO(DAPOConfig()).actor_loss(torch.tensor([[-1.0 + log_ratio]]), None, columns)
    near(found.sum / found.count, loss, 1e-4)


def test_the_loss_is_the_mean_over_tokens():
    """Rows of 1 and 3 tokens at ratio 1: (-1 + 3 * 1) / 4."""
    batch = make_batch([1, 3], [1, 0], groups=[0, 0], advantages=[[1], [-1, -1, -1]])
    columns = columns_of(batch, ["response_mask", "advantages"])
    found = DAPO(DAPOConfig()).actor_loss(torch.full((2, 3), -1.0), None, columns)
    near(found.sum, 2.0)
    near(found.count, 4.0)


def test_a_batch_without_rows():
    metrics = DAPO(DAPOConfig()).advantages(make_batch([1], [1]).select([]))
    assert metrics["algorithm/groups"] == 0 and "algorithm/advantages/mean" not in metrics


def test_what_it_declares():
    algorithm = DAPO(DAPOConfig(max_generations=3))
    assert (algorithm.max_generations, algorithm.min_group_size) == (3, 2)
    assert algorithm.needs == frozenset() and algorithm.trains == ("actor",)
