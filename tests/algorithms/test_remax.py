import pytest

from tests.algorithms.rows import NAN, limited, make_batch, near
from verl.algorithms.remax import ReMax, ReMaxConfig
from verl.batch import Batch
from verl.common.errors import MissingField


def credited(batch: Batch, **keys: object) -> dict[str, float]:
    return limited(ReMax(ReMaxConfig(**keys)), 4).advantages(batch)


def test_by_hand_on_ragged_rows_with_tool_tokens():
    batch = make_batch(
        [1, 3, 2], [1, 0.5, 0], masked=[(1, 1), (2, 1)], rows={"greedy_scores": [0.25, 1.0, 0.5]}
    )  # fmt: skip
    metrics = credited(batch)
    near(batch["advantages"], [0.75, -0.5, 0, -0.5, -0.5, 0])
    near(batch["token_rewards"], [1, 0, 0, 0.5, 0, 0])
    assert batch["returns"][1] == batch["returns"][3] == 0.5
    assert metrics["algorithm/rows_excluded"] == 0
    assert metrics["algorithm/advantages/max"] == 0.75


def test_a_response_is_compared_with_the_greedy_one_alone():
    """Equal scores teach here, and neighbours in the group play no part."""
    batch = make_batch([1] * 4, [1, 1, 1, 0], groups=[0, 0, 1, 1], rows={"greedy_scores": [0.0, 0.0, 1.0, 1.0]})
    credited(batch)
    near(batch["advantages"], [1, 1, 0, -1])


@pytest.mark.parametrize("missing", [NAN, float("inf"), -float("inf")])
def test_without_a_baseline_the_rows_take_no_part(missing):
    batch = make_batch([2, 1, 1], [1, 0, 1], groups=[0, 0, 1], rows={"greedy_scores": [missing, missing, 0.5]})
    metrics = credited(batch)
    near(batch["advantages"], [0, 0, 0, 0.5])
    assert batch["response_mask"].tolist() == [False, False, False, True]
    assert metrics["algorithm/rows_excluded"] == 2


def test_all_baselines_missing():
    batch = make_batch([2, 1], [1, 0], rows={"greedy_scores": [NAN, NAN]})
    assert credited(batch)["algorithm/rows_excluded"] == 2
    assert not batch["advantages"].any() and not batch["response_mask"].any()


def test_failed_and_empty_rows():
    rows = {"greedy_scores": [0.5] * 4, "is_scored": [True, False, True, True], "finish_reason": [0, 0, 2, 0]}
    batch = make_batch([1, 1, 1, 0], [1, 0, 1, 1], rows=rows)
    metrics = credited(batch)
    near(batch["advantages"], [0.5, 0, 0])
    assert (metrics["algorithm/rows_excluded"], metrics["algorithm/rows_empty"]) == (2, 1)


def test_the_kl_is_in_the_return_and_not_in_the_baseline():
    """k1 is 0.4 and 0.2, at 0.5 a nat: rewards -0.2 and 1 - 0.1, returns 0.7 and 0.9, less 0.5."""
    batch = make_batch(
        [2], [1], rows={"greedy_scores": [0.5]}, old_log_probs=[[-1.0, -1.0]], ref_log_probs=[[-1.4, -1.2]]
    )
    metrics = credited(batch, kl_coef=0.5)
    near(batch["token_rewards"], [-0.2, 0.9])
    near(batch["returns"], [0.7, 0.9])
    near(batch["advantages"], [0.2, 0.4])
    assert metrics["actor/reward_kl"] == pytest.approx(0.3)


def test_the_overlong_penalty_is_the_responses_alone():
    batch = make_batch([4], [1], rows={"greedy_scores": [0.25]})
    credited(batch, overlong={"buffer_tokens": 4, "penalty": 0.5})
    near(batch["advantages"], [0.25] * 4)


def test_a_batch_without_baselines_is_refused():
    with pytest.raises(MissingField, match=r"'greedy_scores'.*rewards writes it"):
        credited(make_batch([1], [1]))


def test_what_it_declares():
    assert ReMax(ReMaxConfig()).needs == {"greedy_scores"} and ReMax.min_group_size == 1
    assert ReMax(ReMaxConfig(kl_coef=0.1)).needs == {"greedy_scores", "reference", "old_log_probs"}
    assert ReMax(ReMaxConfig()).keeps(make_batch([1], [1])) is None
    assert ReMax(ReMaxConfig()).max_generations == 1
