import pytest
import torch

from tests.algorithms.rows import NAN, near
from verl.algorithms.group import group_stats, group_sum
from verl.common.errors import ShapeError


def stats(scores, groups=None, keep=None):
    scores = torch.tensor(scores, dtype=torch.float32)
    groups = torch.zeros(len(scores), dtype=torch.int64) if groups is None else torch.tensor(groups)
    return group_stats(scores, groups, torch.ones(len(scores)).bool() if keep is None else torch.tensor(keep))


def test_by_hand():
    got = stats([1, 0, 0, 0])
    near(got.centred, [0.75, -0.25, -0.25, -0.25])
    near(got.std, [0.5] * 4)
    assert got.size.tolist() == [4] * 4 and not got.is_equal.any() and got.groups == 1


@pytest.mark.parametrize("value", [1.0, 0.7, 0.1, 0.35, -3.3, 0.0, 1e8, 1e-8])
@pytest.mark.parametrize("count", [2, 3, 8, 31])
def test_equal_members_are_exactly_zero(value, count):
    got = stats([value] * count)
    assert torch.equal(got.centred, torch.zeros(count).double()) and torch.equal(got.std, torch.zeros(count).double())
    assert got.is_equal.all() and got.equal == 1


def test_rounding_is_no_difference_but_a_small_difference_is():
    assert stats([0.7, 0.7000001, 0.7]).is_equal.all()
    assert not stats([0.7, 0.70001, 0.7]).is_equal.any()


@pytest.mark.parametrize("value", [0.7, 0.0, -2.0])
def test_a_group_of_one_is_zero(value):
    got = stats([value, 1.0, 0.0], [5, 9, 9])
    near(got.centred, [0.0, 0.5, -0.5])
    assert torch.isfinite(got.std).all() and (got.single, got.equal, got.groups) == (1, 0, 2)


def test_rows_taken_out_count_nowhere():
    got = stats([1.0, NAN, 0.0, NAN, 0.7, 0.3], [1, 1, 1, 2, 3, 3], [True, False, True, False, True, False])
    near(got.centred, [0.5, 0.0, -0.5, 0.0, 0.0, 0.0])
    assert got.size.tolist() == [2, 2, 2, 0, 1, 1]
    assert (got.groups, got.empty, got.single, got.equal) == (3, 1, 1, 0)
    assert torch.isfinite(got.std).all()


def test_order_and_ids_do_not_matter():
    scores, groups = [0.1, 0.7, 0.35, 0.2, 0.9, 0.35], [7, -3, 7, -3, 10**12, 7]
    whole = stats(scores, groups)
    order = [5, 2, 4, 0, 3, 1]
    mixed = stats([scores[i] for i in order], [groups[i] for i in order])
    near(mixed.centred, whole.centred[order], 1e-12)
    near(mixed.std, whole.std[order], 1e-12)


def test_no_rows():
    assert stats([]).groups == 0


def test_sizes_must_agree():
    with pytest.raises(ShapeError, match="group_id"):
        group_stats(torch.zeros(2), torch.zeros(3).long(), torch.ones(2).bool())


def test_a_sum_over_each_rows_group():
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0])
    stats = group_stats(scores, torch.tensor([5, -1, 5, 9]), torch.ones(4, dtype=torch.bool))
    assert stats.index.tolist() == [1, 0, 1, 2]
    assert group_sum(scores, stats).tolist() == [4, 2, 4, 4]
