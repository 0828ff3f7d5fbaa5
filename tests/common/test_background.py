from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.trainer.runs import environment
from verl.common.background import Background


def test_the_caller_goes_on_and_wait_waits() -> None:
    background, gate, seen = Background("test"), threading.Event(), []

    def task() -> None:
        gate.wait(10)
        seen.append(threading.current_thread().name)

    background.start(task)
    assert background.is_running and not seen
    background.check()
    gate.set()
    background.wait()
    assert not background.is_running and seen[0].startswith("test")


def test_one_task_at_a_time_in_order() -> None:
    background, gate, seen = Background("test"), threading.Event(), []
    background.start(lambda: (gate.wait(10), seen.append(1)))
    threading.Timer(0.1, gate.set).start()
    background.start(lambda: seen.append(2))
    background.wait()
    assert seen == [1, 2]


@pytest.mark.parametrize("ask", ["wait", "check", "start"])
def test_an_error_comes_out_once(ask: str) -> None:
    background, seen = Background("test"), []
    background.start(lambda: 1 / 0)
    while background.is_running:
        pass
    with pytest.raises(ZeroDivisionError):
        background.start(lambda: seen.append("begun")) if ask == "start" else getattr(background, ask)()
    background.check()
    background.start(lambda: seen.append("next"))
    background.wait()
    assert seen == ["next"]


def test_a_program_that_ends_waits_for_the_task(tmp_path: Path) -> None:
    code = (
        "import time, sys, pathlib\nfrom verl.common.background import Background\n"
        "Background('x').start(lambda: (time.sleep(0.3), pathlib.Path(sys.argv[1]).touch()))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "done")], env=environment(), check=True)
    assert (tmp_path / "done").exists()
