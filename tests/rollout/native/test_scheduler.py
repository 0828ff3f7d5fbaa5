from tests.rollout.engines import request
from verl.batch import FinishReason
from verl.rollout.native.block_manager import BlockManager
from verl.rollout.native.scheduler import Chunk, Scheduler
from verl.rollout.native.sequence import Sequence


def row(length: int, tokens: int = 4, first: int = 0) -> Sequence:
    prompt = [first + i for i in range(length)]
    return Sequence(request(prompt, tokens), prompt, frozenset())


def spans(chunks: list[Chunk]) -> list[tuple[int, int, bool]]:
    return [(chunk.start, chunk.end, chunk.is_last) for chunk in chunks]


def scheduler(blocks: int = 20, rows: int = 8, budget: int = 100) -> Scheduler:
    return Scheduler(BlockManager(blocks, 4, share=True), max_running_rows=rows, max_prefill_tokens=budget)


def test_samples_of_a_prompt_share_its_blocks_in_the_very_same_step() -> None:
    s = scheduler()
    s.add([row(10), row(10), row(10)])
    assert spans(s.prefill()) == [(0, 10, True), (8, 10, True), (8, 10, True)]
    assert s.num_cached_tokens == 16 and len(s.running) == 3
    s.check_integrity()


def test_long_prompts_are_computed_in_pieces_within_the_budget() -> None:
    s = scheduler(budget=6)
    s.add([row(4), row(9, first=20), row(2, first=40)])
    assert spans(s.prefill()) == [(0, 4, True), (0, 2, False)]
    assert spans(s.prefill()) == [(2, 8, False)]
    assert spans(s.prefill()) == [(8, 9, True), (0, 2, True)]
    assert s.prefill() == []


def test_a_sharer_does_not_run_ahead_of_what_is_computed() -> None:
    s = scheduler(budget=6)
    s.add([row(10), row(10)])
    assert spans(s.prefill()) == [(0, 6, False)]
    assert spans(s.prefill()) == [(6, 10, True), (8, 10, True)]


def test_rows_beyond_the_limit_wait_in_order() -> None:
    s = scheduler(rows=2)
    rows = [row(2, first=10 * i) for i in range(4)]
    s.add(rows)
    assert [c.sequence for c in s.prefill()] == rows[:2] and s.prefill() == []
    rows[0].finish_reason = FinishReason.STOP
    s.drop_finished()
    assert [c.sequence for c in s.prefill()] == [rows[2]]


def test_youngest_gives_its_blocks_when_they_run_out_and_comes_back_first() -> None:
    s = scheduler(blocks=3)
    rows = [row(4, 5), row(4, 5, first=50), row(4, 5, first=90)]
    s.add(rows)
    s.prefill()
    assert s.running == rows[:2]  # the third waits: each running row keeps a block in reserve
    for running in rows[:2]:
        running.append(7, -1.0)
        running.num_computed = 4
    assert s.decode(1) == rows[:1]
    assert list(s.waiting) == [rows[1], rows[2]] and s.num_preemptions == 1 and rows[1].blocks == []
    s.check_integrity()
    rows[0].finish_reason = FinishReason.LENGTH
    s.drop_finished()
    assert spans(s.prefill())[0] == (4, 5, True)  # its first block is still known


def test_clear_lets_everything_go() -> None:
    s = scheduler()
    s.add([row(10), row(3)])
    s.prefill()
    s.clear()
    assert not s.has_work and s.blocks.num_free == 20
    s.check_integrity()
    s.add([row(10)])
    assert spans(s.prefill()) == [(0, 10, True)]
