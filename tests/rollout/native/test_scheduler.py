from tests.rollout.engines import request
from verl.batch import FinishReason
from verl.rollout.native.block_manager import BlockManager
from verl.rollout.native.scheduler import Prefill, Scheduler
from verl.rollout.native.sequence import Sequence


def row(length: int, tokens: int = 4, first: int = 0) -> Sequence:
    prompt = [first + i for i in range(length)]
    return Sequence(request(prompt, tokens), prompt, frozenset())


def spans(work: Prefill) -> list[tuple[int, int, bool]]:
    return [(chunk.start, chunk.end, chunk.is_last) for chunk in work.chunks]


def arrive(*rows: Sequence, token: int = 7, tokens: int = 1) -> None:
    """The device's results for ``rows``."""
    for row in rows:
        row.in_flight -= tokens
        row.take([token] * tokens, [-1.0] * tokens, 0)


def scheduler(blocks: int = 20, rows: int = 8, budget: int = 100) -> Scheduler:
    return Scheduler(BlockManager(blocks, 4, share=True), max_running_rows=rows, max_prefill_tokens=budget)


def test_samples_of_a_prompt_are_computed_once_and_share_its_blocks() -> None:
    s = scheduler()
    rows = [row(10), row(10), row(10)]
    s.add([*rows, row(8, first=30), row(8, first=30)])
    work = s.prefill()
    assert spans(work) == [(0, 10, True), (0, 8, True)]
    assert [fork.source for fork in work.forks] == [rows[0], rows[0], work.chunks[1].sequence]
    assert work.sampled[2:4] == rows[1:] and s.num_cached_tokens == 28 and len(s.running) == 5
    for fork, twin in zip(work.forks, rows[1:], strict=False):
        assert twin.blocks[:2] == rows[0].blocks[:2] and fork.copy == (rows[0].blocks[2], twin.blocks[2])
    assert work.forks[2].copy is None and work.forks[2].sequence.blocks == work.chunks[1].sequence.blocks
    s.check_integrity()


def test_without_shared_blocks_every_sample_is_computed() -> None:
    s = Scheduler(BlockManager(20, 4, share=False), max_running_rows=8, max_prefill_tokens=100)
    s.add([row(10), row(10)])
    assert spans(s.prefill()) == [(0, 10, True)] * 2 and s.num_cached_tokens == 0


def test_a_fork_waits_when_no_block_is_free_for_its_own_end() -> None:
    s = scheduler(blocks=4)
    s.add([row(10), row(10)])
    assert not s.prefill().forks and len(s.running) == 1  # one block stays in reserve for the running row
    s.check_integrity()


def test_a_few_free_places_wait_for_more() -> None:
    s = scheduler(blocks=200, rows=32)
    s.add([row(2, first=3 * i) for i in range(40)])
    rows = [chunk.sequence for chunk in s.prefill().chunks]
    assert len(rows) == 32
    arrive(*rows)
    rows[0].finish_reason = FinishReason.STOP
    s.drop_finished()
    assert not s.prefill().chunks
    rows[1].finish_reason = FinishReason.STOP
    s.drop_finished()
    assert len(s.prefill().chunks) == 2


def test_long_prompts_are_computed_in_pieces_within_the_budget() -> None:
    s = scheduler(budget=6)
    s.add([row(4), row(9, first=20), row(2, first=40)])
    assert spans(s.prefill()) == [(0, 4, True), (0, 2, False)]
    assert spans(s.prefill()) == [(2, 8, False)]
    assert spans(s.prefill()) == [(8, 9, True), (0, 2, True)]
    assert not s.prefill().chunks


def test_a_sharer_does_not_run_ahead_of_what_is_computed() -> None:
    s = scheduler(budget=6)
    s.add([row(10), row(10)])
    assert spans(s.prefill()) == [(0, 6, False)]
    work = s.prefill()
    assert spans(work) == [(6, 10, True)] and len(work.forks) == 1


def test_rows_beyond_the_limit_wait_in_order() -> None:
    s = scheduler(rows=2)
    rows = [row(2, first=10 * i) for i in range(4)]
    s.add(rows)
    assert [c.sequence for c in s.prefill().chunks] == rows[:2] and not s.prefill().chunks
    rows[0].finish_reason = FinishReason.STOP
    s.drop_finished()
    assert [c.sequence for c in s.prefill().chunks] == [rows[2]]


def test_youngest_gives_its_blocks_when_they_run_out_and_comes_back_first() -> None:
    s = scheduler(blocks=3)
    rows = [row(4, 5), row(4, 5, first=50), row(4, 5, first=90)]
    s.add(rows)
    s.prefill()
    assert s.running == rows[:2]  # the third waits: each running row keeps a block in reserve
    assert s.decode(1) is None  # the results of the first step may free a block
    arrive(*rows[:2])
    assert s.decode(1) == (rows[:1], 1) and rows[0].in_flight == 1
    assert list(s.waiting) == [rows[1], rows[2]] and s.num_preemptions == 1 and rows[1].blocks == []
    s.check_integrity()
    rows[0].finish_reason = FinishReason.LENGTH
    s.drop_finished()
    assert spans(s.prefill())[0] == (4, 5, True)  # its first block is still known


def test_steps_are_no_more_than_the_longest_row_has_left() -> None:
    s = scheduler()
    rows = [row(4, 3), row(4, 6, first=50)]
    s.add(rows)
    s.prefill()
    assert s.decode(4) == (rows, 4) and rows[0].remaining < 0 and len(rows[0].blocks) == 2
    assert s.decode(4) == (rows[1:], 1) and s.decode(4) is None
