import pytest
import torch

from tests.algorithms.rows import NAN, make_batch, near
from verl.algorithms.credit import assign_credit, place_scores
from verl.batch import Batch, FinishReason
from verl.common.errors import MissingField


@pytest.mark.parametrize(
    ("ids", "length", "mask"),
    [
        ([5, 6, 7, 0, 0, 0], 3, "111000"),  # stopped for length: no stop token to find
        ([5, 2, 0, 0, 0, 0], 2, "110000"),
        ([5, 6, 2, 2, 2, 2], 3, "111000"),  # padding has the id of the stop token
        ([5, 9, 0, 0, 0, 0], 2, "110000"),  # another stop token
        ([5, 0, 0, 2, 0, 0], 4, "111100"),  # the padding's id as a real token
        ([2, 2, 5, 2, 2, 2], 3, "111000"),  # stop tokens in the middle
        ([0, 0, 0, 0, 0, 0], 0, "000000"),
    ],
)
def test_the_mask_is_the_recorded_length(ids, length, mask):
    batch = Batch([{}, {}])
    batch.put("response_ids", torch.tensor([*ids[:length], *range(10, 16)]), [length, 6])
    batch.put("response_mask", torch.ones(length + 6, dtype=torch.bool))
    batch.put("scores", torch.tensor([3.0, 1.0]))
    credit = assign_credit(batch)
    assert "".join("01"[int(x)] for x in credit.mask[0]) == mask
    near(credit.token_rewards[0].sum(), 3.0 if length else 0.0)
    if length:
        near(credit.token_rewards[0, length - 1], 3.0)


def test_a_score_stands_on_the_last_sampled_token():
    mask = torch.tensor([[True, True, False], [True, False, True], [False, False, False], [True, False, False]])
    near(place_scores(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask), [[0, 1, 0], [0, 0, 2], [0, 0, 0], [4, 0, 0]])
    assert place_scores(torch.ones(2), torch.ones(2, 0).bool()).shape == (2, 0)
    assert place_scores(torch.ones(0), torch.ones(0, 0).bool()).shape == (0, 0)


def test_rows_that_do_not_count_lose_their_mask():
    reasons = [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT]
    batch = make_batch(
        [2, 2, 1, 2], [1, 0.5, NAN, 1], rows={"is_scored": [True, False, True, True], "finish_reason": reasons}
    )
    credit = assign_credit(batch)
    assert credit.keep.tolist() == [True, False, False, False]
    assert batch["response_mask"].tolist() == [True, True, False, False, False, False, False]
    near(credit.scores, [1, 0, 0, 0])
    near(credit.token_rewards, [[0, 1], [0, 0], [0, 0], [0, 0]])


def test_without_scores_the_writer_is_named():
    batch = Batch([{}])
    batch.put("response_ids", torch.tensor([1]), [1])
    batch.put("response_mask", torch.tensor([True]))
    with pytest.raises(MissingField, match="rewards"):
        assign_credit(batch)
