import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.processes import is_gone
from verl.common.errors import ConfigError, RewardError, UnknownName
from verl.rewards import pool
from verl.rewards.base import RewardItem
from verl.rewards.config import RewardConfig
from verl.rewards.runner import RewardCounts, RewardRunner


def items(*responses: str, **row: Any) -> list[RewardItem]:
    return [RewardItem(prompt="p", response=r, ground_truth="57", row=row) for r in responses]


def score_of(runner: RewardRunner, *responses: str) -> list[float | None]:
    return [result.score for result in runner.score(items(*responses))]


def misbehave(response: str) -> Any:
    if response == "sleep":
        time.sleep(1000)
    elif response == "stuck in C":
        re.match(r"(a+)+$", "a" * 60 + "b")
    elif response == "exit":
        os._exit(3)
    elif response == "segfault":
        os.kill(os.getpid(), 11)
    elif response == "raise":
        raise KeyError("no such thing")
    elif response == "sys.exit":
        raise SystemExit(1)
    elif response == "none":
        return None
    return 1


@pytest.mark.parametrize("workers", [1, 2])
def test_one_bad_item_costs_only_itself(workers: int) -> None:
    with RewardRunner(misbehave, RewardConfig(timeout_s=1, workers=workers)) as runner:
        start = time.perf_counter()
        results = runner.score(items("good", "good", "sleep", "good"))
        assert time.perf_counter() - start < 10
        assert [r.score for r in results] == [1, 1, None, 1]
        assert results[2].failure == "timeout"
        assert runner.counts == RewardCounts(scored=3, timeouts=1)
        assert score_of(runner, "good", "good", "good", "good") == [1, 1, 1, 1]


def test_every_kind_of_failure_is_kept_apart() -> None:
    bad = ["exit", "segfault", "raise", "sys.exit", "none", "stuck in C"]
    with RewardRunner(misbehave, RewardConfig(timeout_s=1)) as runner:
        results = runner.score(items(*[r for one in bad for r in (one, "good")]))
        assert [r.score for r in results[1::2]] == [1] * len(bad)
        assert [r.failure for r in results[::2]] == ["error"] * 4 + ["invalid", "timeout"]
        details = [r.detail for r in results[::2]]
        assert "exit code 3" in details[0]
        assert "SIGSEGV" in details[1]
        assert "KeyError: 'no such thing'" in details[2]
        assert runner.counts == RewardCounts(scored=6, timeouts=1, errors=4, invalid=1)


def leave_a_child(response: str) -> float:
    """Its forked child comes back from it, as one does that forgets to exit, or whose exit is caught."""
    if os.fork() == 0:
        if response == "exit":
            raise SystemExit(0)
        return 7.0
    os.wait()
    return float(len(response))


def test_a_forked_child_that_comes_back_answers_nothing() -> None:
    with RewardRunner(leave_a_child, RewardConfig(timeout_s=20, workers=1)) as runner:
        assert score_of(runner, "a", "exit", "ab", "exit", "abc") == [1, 4, 2, 4, 3]
        assert runner.counts == RewardCounts(scored=5)


def test_children_of_a_timed_out_function_die(tmp_path: Path) -> None:
    def with_child(response: str) -> int:
        import subprocess

        child = subprocess.Popen(["sleep", "1000"])
        (tmp_path / "pid").write_text(str(child.pid))
        return child.wait()

    with RewardRunner(with_child, RewardConfig(timeout_s=1, workers=1)) as runner:
        assert runner.score(items("x"))[0].failure == "timeout"
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_results_keep_the_order_and_prints_are_harmless() -> None:
    def loud(response: str) -> float:
        print("x" * 100_000)  # noqa: T201
        time.sleep(0.02 * (int(response) % 3))
        return int(response)

    with RewardRunner(loud) as runner:
        assert score_of(runner, *map(str, range(12))) == list(range(12))


def test_from_many_threads() -> None:
    scores: dict[int, list[float | None]] = {}
    with RewardRunner("math") as runner:

        def work(number: int) -> None:
            scores[number] = score_of(runner, f"\\boxed{{{number}}}", r"\boxed{\frac{114}{2}}")

        threads = [threading.Thread(target=work, args=(n,)) for n in (56, 57, 58)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert scores == {56: [0, 1], 57: [1, 1], 58: [0, 1]}
        assert [r.score for r in runner.score_async(items(r"\boxed{57}")).result()] == [1]
        assert runner.counts == RewardCounts(scored=7)


def test_signal_based_limits_of_user_code_work() -> None:
    def alarmed(response: str) -> float:
        import signal

        def ring(*_: Any) -> None:
            raise TimeoutError

        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            time.sleep(20)
        except TimeoutError:
            return 0.5
        return 0.0

    with RewardRunner(alarmed, RewardConfig(workers=1)) as runner:
        assert score_of(runner, "x") == [0.5]


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_and_kwargs_reach_the_function(workers: int) -> None:
    def f(response: str, level: int, scale: float = 1) -> dict[str, Any]:
        return {"score": level * scale, "length": len(response), "pred": response}

    with RewardRunner(f, RewardConfig(kwargs={"scale": 0.5}, workers=workers)) as runner:
        result = runner.score(items("abc", level=3))[0]
        assert (result.score, result.parts) == (1.5, {"length": 3})
        assert "level" in runner.score(items("abc"))[0].detail


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_failure_does(workers: int) -> None:
    scores = {}
    for policy in ("drop", "zero"):
        with RewardRunner(misbehave, RewardConfig(on_failure=policy, workers=workers)) as runner:  # type: ignore[arg-type]
            results = runner.score(items("raise", "good"))
            scores[policy] = [r.score for r in results]
            assert [r.failure for r in results] == ["error", None]
            assert runner.counts.errors == 1
    assert scores == {"drop": [None, 1], "zero": [0, 1]}
    with (
        RewardRunner(misbehave, RewardConfig(on_failure="raise", workers=workers)) as runner,
        pytest.raises(RewardError, match=r"item 1.*no such thing"),
    ):
        runner.score(items("good", "raise"))


def test_cache(tmp_path: Path) -> None:
    def f(response: str) -> int:
        with (tmp_path / "calls").open("a") as file:
            file.write(response)
        if response == "z":
            raise ValueError
        return 1

    with RewardRunner(f, RewardConfig(cache=True, workers=1)) as runner:
        for _ in range(3):
            assert score_of(runner, "x", "y") == [1, 1]
        assert score_of(runner, "z") == score_of(runner, "z") == [None]
        assert runner.score(items("x", level=2))[0].score == 1  # another row
        assert runner.counts == RewardCounts(scored=7, errors=2)
    assert (tmp_path / "calls").read_text() == "xyzzx"


def test_a_row_that_cannot_travel_fails_alone() -> None:
    lock = threading.Lock()
    mixed = [*items("a"), RewardItem(prompt="p", response="b", row={"lock": lock}), *items("c")]
    with RewardRunner(misbehave) as runner:
        assert [r.failure for r in runner.score(mixed)] == [None, "error", None]


def test_what_cannot_travel_runs_here(caplog: pytest.LogCaptureFixture) -> None:
    import torch  # here, so that workers that import this module stay light

    model = torch.nn.Linear(1, 1)

    def with_model(response: str) -> float:
        if response == "bad":
            raise ValueError
        return float(model.weight.numel())

    with caplog.at_level(logging.WARNING), RewardRunner(with_model) as runner:
        assert score_of(runner, "good", "bad", "good") == [1, None, 1]
    assert len([r for r in caplog.records if "without time limits" in r.message]) == 1


def test_a_reward_model_gets_all_items_at_once() -> None:
    class Lengths:
        calls = 0

        def score_items(self, given: Sequence[RewardItem]) -> list[Any]:
            self.calls += 1
            return [len(item.response) or float("nan") for item in given]

    model = Lengths()
    with RewardRunner(model) as runner:
        assert score_of(runner, "a", "", "ccc") == [1, None, 3]
        assert runner.counts == RewardCounts(scored=2, invalid=1)
        assert runner.score([]) == []
    assert model.calls == 1


def test_functions_by_name_and_place(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def f(response): return len(response)\n")
    for reward in ("gsm8k", f"{path}:f", "verl.rewards.exact:exact"):
        with RewardRunner(reward, RewardConfig(workers=1)) as runner:
            assert score_of(runner, "57") == [{"gsm8k": 0, f"{path}:f": 2}.get(reward, 1)]
    config = RewardConfig(name="gsm8k", kwargs={"mode": "flexible"}, workers=1)
    for runner in (RewardRunner(config), RewardRunner(config, config)):
        with runner:
            assert score_of(runner, "57") == [1]


@pytest.mark.parametrize(
    "text", ["import nothing_like_this", "1 / 0", "import os; os._exit(4)", "def g(): pass", "x ="]
)
def test_a_function_that_cannot_be_loaded_is_a_config_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with RewardRunner(f"{path}:f", RewardConfig(workers=2)) as runner:
        with pytest.raises(ConfigError, match="can't be loaded"):
            runner.start()
        with pytest.raises(ConfigError, match="can't be loaded"):
            runner.score(items("a", "b", "c"))


@pytest.mark.parametrize("text", ["import time; time.sleep(600)", "class f:\n  def __init__(self): input_never(600)"])
def test_a_file_that_blocks_when_it_is_run_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(pool, "LEAST_LOAD_LIMIT_S", 2.0)
    path = tmp_path / "mine.py"
    note = "import os, pathlib\npathlib.Path(__file__).with_name(f'{os.getpid()}.pid').touch()\n"
    path.write_text(f"{note}from time import sleep as input_never\n{text}\n")
    start = time.perf_counter()
    runner = RewardRunner(f"{path}:f", RewardConfig(workers=2, timeout_s=0.5))
    with runner, pytest.raises(ConfigError, match=r"wasn't loaded within 2 s.*reward\.timeout_s"):
        runner.start()
    assert time.perf_counter() - start < 20
    pids = [int(found.stem) for found in tmp_path.glob("*.pid")]
    assert pids and all(is_gone(pid) for pid in pids)


def test_a_slow_load_may_take_as_long_as_a_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "LEAST_LOAD_LIMIT_S", 0.1)
    path = tmp_path / "mine.py"
    path.write_text("import time\ntime.sleep(1)\ndef f(response, entry): return 1.0\n")
    with RewardRunner(f"{path}:f", RewardConfig(workers=1, timeout_s=60)) as runner:
        assert not runner.needs
        runner.start()
        assert runner.needs == {"response", "entry"}


def test_an_error_of_ours_is_told_without_its_place(tmp_path: Path) -> None:
    with (
        RewardRunner(lambda response: 1.0, RewardConfig(kwargs={"zz": 1})) as runner,
        pytest.raises(ConfigError, match=r"loaded: reward\.kwargs names") as found,
    ):
        runner.start()
    assert "calling.py" not in str(found.value)
    with pytest.raises(ConfigError, match=r"a reward is a function .*reasoning_gym.*file\.py:function.*got int 3"):
        RewardRunner(3)  # type: ignore[arg-type]


class Judge:
    """A reward model whose weights come with ``load``."""

    is_loaded = False

    def load(self) -> None:
        self.is_loaded = True

    def score_items(self, items: Sequence[RewardItem]) -> Sequence[float]:
        return [1.0 for _ in items]


def test_workers_start_without_a_model() -> None:
    judge = Judge()
    with RewardRunner(judge) as runner:
        runner.start_workers()
        assert not judge.is_loaded
        runner.start()
    assert judge.is_loaded
    with RewardRunner("no_such_module_xyz:f") as runner, pytest.raises(ConfigError, match="can't be loaded"):
        runner.start_workers()


def test_one_reward_and_a_known_one() -> None:
    with pytest.raises(UnknownName, match="gsm8k"):
        RewardRunner("gsm8")
    with pytest.raises(ConfigError, match="none"):
        RewardRunner(RewardConfig())
    with pytest.raises(ConfigError, match="one reward"):
        RewardRunner(misbehave, RewardConfig(name="gsm8k"))
    with (
        RewardRunner(lambda: 1, RewardConfig(kwargs={"scale": 2})) as runner,
        pytest.raises(ConfigError, match="scale"),
    ):
        runner.start()


def test_close_ends_what_is_running() -> None:
    runner = RewardRunner(misbehave, RewardConfig(timeout_s=100))
    running = runner.score_async(items("good", "sleep", "sleep", "sleep", "sleep"))
    time.sleep(0.5)
    start = time.perf_counter()
    runner.close()
    runner.close()
    assert time.perf_counter() - start < 5
    assert running.done()
    with pytest.raises(RewardError, match="closed"):
        runner.score(items("good"))
