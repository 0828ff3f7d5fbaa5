import torch

from verl.rollout.native.advance import Outputs, advance
from verl.rollout.native.row_state import RowState

CPU = torch.device("cpu")


def rows(left: list[int], stop_ids: list[list[int]], index: int = 0, min_new: int = 0) -> RowState:
    """Rows at position 10 whose last token was 1, seat by seat."""
    state = RowState.empty(len(left), len(stop_ids[0]), 2, CPU)
    state.left.copy_(torch.tensor(left))
    state.positions.copy_(torch.where(state.left > 0, 10, -1))
    state.tokens.fill_(1)
    state.index.fill_(index)
    state.min_new.fill_(min_new)
    state.stop_ids.copy_(torch.tensor(stop_ids).reshape(len(left), -1))
    return state


def seen(state: RowState) -> list[list[int]]:
    return [column.tolist() for column in (state.tokens, state.positions, state.left, state.index)]


def test_rows_go_on_and_end_by_stop_id_or_length_and_others_stay() -> None:
    state = rows([5, 5, 1, 0], [[7, 8], [9, -1], [-1, -1], [7, -1]], index=3)
    out = Outputs.empty(3, 4, CPU)
    out.count.fill_(1)
    advance(torch.tensor([6, 9, 5, 7]), torch.tensor([-0.5, -1.0, -2.0, float("nan")]), state, out)
    assert out.tokens.tolist() == [[0] * 4, [6, 9, 5, -1], [0] * 4]
    assert out.log_probs.tolist() == [[0.0] * 4, [-0.5, -1.0, -2.0, 0.0], [0.0] * 4]
    assert seen(state) == [[6, 9, 5, 1], [11, -1, -1, -1], [4, 0, 0, 0], [4, 4, 4, 3]]
    assert int(out.count) == 1


def test_a_stop_id_ends_a_row_once_it_has_its_minimum_of_tokens() -> None:
    state = rows([5, 5], [[7], [7]])
    state.min_new.copy_(torch.tensor([1, 2]))
    advance(torch.tensor([7, 7]), torch.zeros(2), state, Outputs.empty(1, 2, CPU))
    assert seen(state)[1:] == [[-1, 11], [0, 4], [1, 1]]


def test_without_stop_ids_only_the_length_ends_a_row() -> None:
    state = rows([2], [[]])
    out = Outputs.empty(2, 1, CPU)
    for step in range(2):
        out.count.fill_(step)
        advance(torch.tensor([0]), torch.zeros(1), state, out)
    assert seen(state) == [[0], [-1], [0], [2]]
