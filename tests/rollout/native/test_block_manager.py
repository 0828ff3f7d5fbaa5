import random

import pytest

from verl.rollout.native.block_manager import BlockManager


def allocate(manager: BlockManager, tokens: list[int]) -> tuple[list[int], int]:
    allocated = manager.allocate(tokens)
    assert allocated is not None
    manager.publish(tokens, allocated[0], len(tokens))
    return allocated


@pytest.mark.parametrize(("length", "known"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_second_of_equal_prompts_shares_full_blocks_and_computes_a_token(length: int, known: int) -> None:
    manager, tokens = BlockManager(20, 4, share=True), list(range(length))
    first, none = allocate(manager, tokens)
    second, found = allocate(manager, tokens)
    assert (none, found) == (0, known) and length - found >= 1
    assert first[: known // 4] == second[: known // 4] and not set(first[known // 4 :]) & set(second[known // 4 :])
    manager.check_integrity([first, second])


def test_blocks_are_known_by_all_that_stands_before_them() -> None:
    manager = BlockManager(20, 2, share=True)
    allocate(manager, [1, 2, 3, 4, 9])
    assert allocate(manager, [7, 7, 3, 4, 9])[1] == 0
    assert allocate(manager, [1, 2, 5, 6, 9])[1] == 2
    assert allocate(manager, [1, 2, 3, 4, 8, 8])[1] == 4


def test_released_blocks_stay_known_until_they_are_needed() -> None:
    manager = BlockManager(4, 2, share=True)
    blocks, _ = allocate(manager, [1, 2, 3, 4, 5])  # two known blocks, one partial
    manager.release(blocks)
    assert blocks == [] and manager.num_free == 4
    again, found = allocate(manager, [1, 2, 3, 4, 5])
    assert found == 4
    manager.release(again)
    other = allocate(manager, [9, 9, 8, 8, 7])[0]  # takes the two unknown blocks, then the end of the known row
    manager.check_integrity([other])
    manager.release(other)
    assert allocate(manager, [1, 2, 3, 4, 5])[1] == 2


def test_nothing_is_shared_when_told_not_to_or_when_forgotten() -> None:
    off = BlockManager(9, 2, share=False)
    allocate(off, [1, 2, 3])
    assert allocate(off, [1, 2, 3])[1] == 0
    manager = BlockManager(9, 2, share=True)
    blocks, _ = allocate(manager, [1, 2, 3])
    manager.forget()
    assert allocate(manager, [1, 2, 3])[1] == 0
    manager.check_integrity([blocks, [2 + 1, 4]])


def test_too_few_free_blocks_leave_everything_as_it_was() -> None:
    manager = BlockManager(3, 2, share=True)
    blocks, _ = allocate(manager, [1, 2, 3, 4])
    assert manager.allocate([5, 6, 7]) is None
    assert manager.allocate([5, 6], reserve=1) is None
    assert not manager.extend(blocks, 7) and len(blocks) == 2
    assert manager.extend(blocks, 6) and len(blocks) == 3
    manager.check_integrity([blocks])


def test_shared_idle_blocks_are_counted_once() -> None:
    manager = BlockManager(3, 2, share=True)
    manager.release(allocate(manager, [1, 2, 3, 4, 5])[0])
    blocks, found = allocate(manager, [1, 2, 3, 4, 5, 6])
    assert found == 4 and len(blocks) == 3 and manager.num_free == 0


@pytest.mark.parametrize(("length", "shared"), [(3, 0), (4, 1), (5, 1), (8, 2)])
def test_a_fork_shares_full_blocks_and_copies_a_partial_one(length: int, shared: int) -> None:
    manager = BlockManager(5, 4, share=True)
    blocks, _ = allocate(manager, list(range(length)))
    forked = manager.fork(blocks, length)
    assert forked is not None
    twin, copy = forked
    assert twin[:shared] == blocks[:shared] and len(twin) == len(blocks)
    assert copy == (None if length % 4 == 0 else (blocks[-1], twin[-1])) and (copy is None or copy[0] != copy[1])
    manager.check_integrity([blocks, twin])
    manager.release(blocks)
    manager.check_integrity([twin])  # what is shared outlives the row that it came from


def test_a_fork_without_a_free_block_does_nothing() -> None:
    manager = BlockManager(2, 4, share=True)
    blocks, _ = allocate(manager, list(range(5)))
    assert manager.fork(blocks, 5) is None
    assert manager.fork(blocks[:1], 4, reserve=1) is None
    manager.check_integrity([blocks])


def test_integrity_holds_over_a_thousand_random_steps_and_sees_a_fault() -> None:
    chance, manager, rows = random.Random(0), BlockManager(12, 3, share=True), []
    for _ in range(1000):
        tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 20))]
        allocated = manager.allocate(tokens) if chance.random() < 0.5 else None
        if allocated is not None:
            manager.publish(tokens, allocated[0], len(tokens))
            rows.append(allocated[0])
        elif rows:
            manager.release(rows.pop(chance.randrange(len(rows))))
        manager.check_integrity(rows)
    with pytest.raises(AssertionError):
        manager.check_integrity([*rows, [1]])
