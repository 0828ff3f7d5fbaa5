import os
import signal
import subprocess
import sys

import pytest

from tests.processes import is_gone

CHILD = """
import os, signal, subprocess, sys, time
from verl.common.guardian import go_on_in_child
first = os.getpid()
go_on_in_child(os.getppid())
child = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
print(first, os.getpid(), child.pid, flush=True)
exec(sys.argv[1])
"""
PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], start_new_session=True).wait()
"""


def guarded(then: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A process that has gone on in its child, with a child of that one's own; their pids, the guardian's first."""
    command = [sys.executable, "-c", CHILD, then]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    return process, [int(word) for word in process.stdout.readline().split()]


@pytest.mark.parametrize(
    ("then", "code"),
    [("sys.exit(3)", 3), ("pass", 0), ("os.kill(os.getpid(), signal.SIGSEGV)", -11), ("os.kill(os.getpid(), 9)", -9)],
)
def test_the_guardian_ends_as_its_child(then: str, code: int) -> None:
    process, pids = guarded(then)
    assert process.wait(timeout=30) == code
    os.killpg(process.pid, signal.SIGKILL)  # what the child left
    assert process.stdout is not None
    process.stdout.close()
    assert all(is_gone(pid) for pid in pids)


def test_a_guardian_told_to_end_takes_all_along() -> None:
    process, pids = guarded("time.sleep(1000)")
    assert pids[0] == process.pid != pids[1]
    process.terminate()
    process.communicate(timeout=30)
    assert all(is_gone(pid) for pid in pids)


def test_a_killed_guardian_takes_its_child_along() -> None:
    process, pids = guarded("time.sleep(1000)")
    process.kill()
    process.communicate(timeout=30)
    assert is_gone(pids[1])
    os.kill(pids[2], signal.SIGKILL)


def test_all_die_with_a_killed_parent_that_is_stuck_in_c() -> None:
    command = [sys.executable, "-c", PARENT, CHILD, "__import__('re').match('(a+)+$', 'a' * 60 + 'b')"]
    for _ in range(5):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        process.kill()
        process.communicate(timeout=30)
        assert len(pids) == 3
        assert all(is_gone(pid) for pid in pids)
