import gc
import subprocess
import sys

import pytest

from verl.common.collector import paused_collector


def test_the_collector_goes_on_after_a_pause() -> None:
    assert gc.isenabled()
    with paused_collector():
        assert not gc.isenabled()
        with paused_collector():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), paused_collector():
        raise KeyError
    assert gc.isenabled()


def test_an_exit_without_collecting_still_runs_what_was_registered() -> None:
    script = """
import atexit, gc
from verl.common.collector import exit_without_collecting
exit_without_collecting()
atexit.register(lambda: print("frozen", gc.get_freeze_count()))
class Cycle:
    def __del__(self):
        print("collected")
cycle = Cycle()
cycle.itself = cycle
del cycle
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "frozen 0\n"
