import multiprocessing
import pickle

import pytest
import torch

from verl.batch import FIELDS, Batch, FinishReason, pad_rows, row_mask, unpad_rows
from verl.common.errors import MissingField, ShapeError


def batch() -> Batch:
    """Three rows with responses of 2, 0 and 3 tokens."""
    made = Batch([{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}])
    made.put("prompt_ids", torch.tensor([1, 2, 3, 4]), [1, 1, 2])
    made.put("response_ids", torch.tensor([10, 11, 30, 31, 32]), [2, 0, 3])
    made.put("values", torch.tensor([0.5, 1.5, 2.5, 3.5, 4.5]))
    made.put("scores", torch.tensor([1.0, 2.0, 3.0]))
    return made


def test_columns_and_lengths() -> None:
    made = batch()
    assert len(made) == 3 and made.names == ["prompt_ids", "response_ids", "scores", "values"]
    assert "values" in made and "advantages" not in made
    assert made["response_ids"].tolist() == [10, 11, 30, 31, 32]
    assert made.lengths("values").tolist() == [2, 0, 3] and made.lengths("prompt_ids").tolist() == [1, 1, 2]
    assert made["scores"].tolist() == [1, 2, 3]


def test_padded_and_back() -> None:
    made = batch()
    assert made.padded("values", fill=-1).tolist() == [[0.5, 1.5, -1], [-1, -1, -1], [2.5, 3.5, 4.5]]
    made.put_padded("returns", torch.arange(9.0).reshape(3, 3))
    assert made["returns"].tolist() == [0, 1, 6, 7, 8]
    made.put_padded("advantages", torch.arange(12.0).reshape(3, 4))
    assert made["advantages"].tolist() == [0, 1, 8, 9, 10]
    with pytest.raises(ShapeError, match=r"\[3, 2\] padded values don't hold rows of lengths \[2, 0, 3\]"):
        made.put_padded("returns", torch.zeros(3, 2))
    with pytest.raises(ShapeError, match="one value a row"):
        made.put_padded("scores", torch.zeros(3, 3))


def test_values_are_stored_as_the_table_says() -> None:
    made = batch()
    made.put("response_mask", torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0]))
    assert made["response_mask"].tolist() == [True, False, True, True, False]
    made.put("finish_reason", torch.tensor([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT]))
    assert made["finish_reason"].dtype == torch.int64 and made["finish_reason"].tolist() == [0, 1, 2]
    made.put("scores", torch.tensor([1, 2, 3], dtype=torch.float64).requires_grad_())
    assert made["scores"].dtype == torch.float32 and not made["scores"].requires_grad
    with pytest.raises(ShapeError, match=r"'row_id' holds integers, got torch.float32"):
        made.put("row_id", torch.tensor([0.5, 1.0, 2.0]))
    for name, field in FIELDS.items():
        fresh = Batch([{}, {}])
        values = torch.zeros(2 if field.shape == "row" else 3).to(field.dtype)
        fresh.put(name, values, None if field.shape == "row" else [1, 2])
        assert fresh[name].dtype == field.dtype


@pytest.mark.parametrize(
    ("name", "size", "lengths", "text"),
    [
        ("scores", 2, None, r"'scores' needs shape \[3\], got \[2\]"),
        ("values", 4, None, r"\[4\] values for 3 lengths summing to 5"),
        ("values", 5, [2, 3], r"for 2 lengths summing to 5, none negative, in a batch of 3 rows"),
        ("values", 5, [3, 0, 2], "must have the lengths of 'response_ids'"),
        ("prompt_ids", 4, [5, -2, 1], "none negative"),
        ("response_ids", 5, [3, 0, 2], "must have the lengths of 'values'"),
    ],
)
def test_sizes_that_disagree(name: str, size: int, lengths: list[int] | None, text: str) -> None:
    made = batch()
    with pytest.raises(ShapeError, match=text):
        made.put(name, torch.zeros(size, dtype=FIELDS[name].dtype), lengths)
    assert made["values"].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5] and made.lengths("values").tolist() == [2, 0, 3]


def test_response_columns_agree_in_whatever_order_they_come() -> None:
    made = Batch([{}, {}])
    made.put("rollout_log_probs", torch.zeros(3), [1, 2])
    with pytest.raises(ShapeError, match="must have the lengths of 'rollout_log_probs'"):
        made.put("response_ids", torch.zeros(3, dtype=torch.int64), [2, 1])
    made.put("values", torch.zeros(3))
    assert made.lengths("values").tolist() == [1, 2]


def test_missing_and_misspelt_columns() -> None:
    made = batch()
    with pytest.raises(MissingField, match=r"column 'advantages' isn't in the batch yet: algorithms writes it"):
        made["advantages"]
    with pytest.raises(MissingField, match=r"'advantage' is no column .*did you mean 'advantages'"):
        made.put("advantage", torch.zeros(3))
    with pytest.raises(MissingField, match="rollout writes it"):
        Batch([{}]).put("values", torch.zeros(1))
    with pytest.raises(ShapeError, match="one value a row"):
        made.lengths("scores")


@pytest.mark.parametrize("index", [[2, 0, 2], torch.tensor([2, 0, 2]), [-1, 0, -1]])
def test_select_by_number(index: list[int] | torch.Tensor) -> None:
    part = batch().select(index)
    assert [row["prompt"] for row in part.rows] == ["c", "a", "c"]
    assert part["response_ids"].tolist() == [30, 31, 32, 10, 11, 30, 31, 32]
    assert part.lengths("values").tolist() == [3, 2, 3] and part["scores"].tolist() == [3, 1, 3]


@pytest.mark.parametrize("mask", [[False, True, True], torch.tensor([False, True, True])])
def test_select_by_mask(mask: list[bool] | torch.Tensor) -> None:
    part = batch().select(mask)
    assert [row["prompt"] for row in part.rows] == ["b", "c"] and part["values"].tolist() == [2.5, 3.5, 4.5]
    with pytest.raises(ShapeError, match=r"a mask over 3 rows has shape \[2\]"):
        batch().select(torch.tensor([True, False]))


def test_select_nothing_and_out_of_range() -> None:
    for index in ([], torch.tensor([], dtype=torch.int64), [False] * 3):
        part = batch().select(index)
        assert len(part) == 0 and part["values"].shape == (0,) and part.padded("values").shape == (0, 0)
        assert part.names == batch().names
    with pytest.raises(IndexError):
        batch().select([3])


def test_cat() -> None:
    made = batch()
    whole = Batch.cat([made.select([0]), made.select([1]), made.select([2])])
    assert whole.rows == made.rows and whole.names == made.names
    for name in made.names:
        assert torch.equal(whole[name], made[name])
    assert whole.lengths("values").tolist() == [2, 0, 3]
    assert len(Batch.cat([made.select([]), made])) == 3
    with pytest.raises(ShapeError, match="different columns"):
        Batch.cat([made, Batch([{}])])
    with pytest.raises(ShapeError, match="no batches"):
        Batch.cat([])


def test_rows_without_any_response_token() -> None:
    made = Batch([{}, {}])
    made.put("response_ids", torch.zeros(0, dtype=torch.int64), [0, 0])
    made.put("values", torch.zeros(0))
    assert made.padded("values").shape == (2, 0) and made.lengths("values").tolist() == [0, 0]
    made.put_padded("returns", torch.zeros(2, 0))
    assert len(Batch.cat([made, made.select([1])])) == 3
    assert Batch([]).names == [] and len(Batch([])) == 0


def double(made: Batch) -> Batch:
    made.put("returns", made["values"] * 2)
    return made


def test_a_batch_crosses_processes() -> None:
    again = pickle.loads(pickle.dumps(batch()))
    assert again["values"].tolist() == batch()["values"].tolist() and again.rows == batch().rows
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        back = pool.apply(double, (batch(),))
    assert back["returns"].tolist() == [1, 3, 5, 7, 9] and back.lengths("returns").tolist() == [2, 0, 3]


def test_padding_helpers() -> None:
    lengths = torch.tensor([1, 0, 2])
    padded = pad_rows(torch.tensor([True, False, True]), lengths)
    assert padded.tolist() == [[True, False], [False, False], [False, True]]
    assert unpad_rows(padded, lengths).tolist() == [True, False, True]
    assert row_mask(lengths, 3).tolist() == [[True, False, False], [False] * 3, [True, True, False]]
    assert pad_rows(torch.zeros(0), torch.tensor([], dtype=torch.int64)).shape == (0, 0)
    for size in (2, 4):
        with pytest.raises(ShapeError, match=rf"\[{size}\] values for 3 lengths summing to 3"):
            pad_rows(torch.zeros(size), lengths)
    with pytest.raises(ShapeError):
        unpad_rows(torch.zeros(2, 2), lengths)
