import numpy as np
import pytest
import torch

from tests.rollout.engines import request
from verl.rollout.native.advance import Outputs
from verl.rollout.native.row_state import RowState
from verl.rollout.native.sequence import Sequence


def row(
    prompt: list[int], blocks: list[int], stops: tuple[int, ...] = (), seed: int = 0, **settings: object
) -> Sequence:
    made = Sequence(request(prompt, 5, seed=seed, **settings), prompt, frozenset(stops))  # type: ignore[arg-type]
    made.blocks = blocks
    return made


def test_columns_hold_what_the_requests_say() -> None:
    big = row([4, 5, 6], [7, 8], (1, 2), seed=(1 << 63) + 5, temperature=0.5, top_p=0.75, min_new_tokens=2)
    state = RowState.of([big, row([9], [3], (300,))], vocab_size=100)
    assert state.tokens.tolist() == [6, 9] and state.positions.tolist() == [2, 0] and state.left.tolist() == [5, 5]
    assert state.seed_low.tolist() == [5, 0] and state.seed_high.tolist() == [-(1 << 31), 0]
    assert state.temperature.tolist() == [0.5, 0.0] and state.top_p.tolist() == [0.75, 1.0]
    assert state.stop_ids.tolist() == [[1, 2], [-1, -1]]  # 300 is no id of the vocabulary
    assert state.tables.tolist() == [[7, 8], [3, 0]] and state.min_new.tolist() == [2, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_type_of_torch_changes_nothing(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        state, out = RowState.of([row([9], [3], temperature=0.7)], 100), Outputs.empty(2, 1, torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert state.temperature.tolist() == [pytest.approx(0.7)] and state.top_p.tolist() == [1.0]
    assert out.log_probs.dtype == torch.float32


def test_seeds_of_numpy_are_those_of_python() -> None:
    states = [RowState.of([row([9], [3], seed=seed)], 100) for seed in (np.int64(-5), -5)]
    assert states[0].columns.tolist() == states[1].columns.tolist()


def test_slots_are_put_moved_and_cleared_in_place() -> None:
    state = RowState.empty(4, 2, 3, torch.device("cpu"))
    assert state.positions.tolist() == [-1] * 4
    state.put(torch.tensor([2, 0]), RowState.of([row([4, 5], [7]), row([9], [3])], 100, stop_ids=2))
    assert state.tokens.tolist() == [9, 0, 5, 0] and state.tables[:, 0].tolist() == [3, 0, 7, 0]
    view = state.first(2)
    state.put(torch.tensor([1]), state.at(torch.tensor([2])))
    assert view.tokens.tolist() == [9, 5] and view.tables[:, 0].tolist() == [3, 7]
    state.clear(1, 4)
    assert view.positions.tolist() == [0, -1] and state.left.tolist() == [5, 0, 0, 0]


def test_keys_go_to_the_rows_block_and_those_of_no_row_to_the_padding_block() -> None:
    state = RowState.of([row([1] * 6, [5, 2]), row([1], [3])], 100)
    assert state.slots_in_cache(4).tolist() == [2 * 4 + 1, 3 * 4]
    state.clear(0, 1)
    assert state.slots_in_cache(4).tolist() == [0, 3 * 4]
