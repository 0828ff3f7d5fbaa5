"""The pool as a user's own script sees it: no main guard, killed, or left unclosed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.processes import is_gone

SCRIPT = """
import os, subprocess, sys, time
from verl.rewards.base import RewardItem
from verl.rewards.config import RewardConfig
from verl.rewards.runner import RewardRunner

print("script runs", flush=True)
SCALE = 2

class Helper:
    value = 1

def reward(response, helper):
    if response == "hang":
        child = subprocess.Popen(["sleep", "1000"])
        print("pids", os.getpid(), child.pid, flush=True)
        __import__("re").match("(a+)+$", "a" * 60 + "b")
    return SCALE * len(response) + helper.value

runner = RewardRunner(reward, RewardConfig(workers=1, timeout_s=100))
items = [RewardItem(prompt="p", response=r, row={"helper": Helper()}) for r in sys.argv[1:]]
print([r.score for r in runner.score(items)], flush=True)
"""


def start(tmp_path: Path, *responses: str) -> subprocess.Popen[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), *responses]
    if sys.version_info < (3, 11):  # no way to keep the script's own folder out of its path
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    (tmp_path / "queue.py").write_text("raise RuntimeError('a file in the working folder shadows the library')")
    command.insert(1, "-P")
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)


def test_a_script_without_a_guard_runs_once_and_ends_without_close(tmp_path: Path) -> None:
    process = start(tmp_path, "ab", "abc")
    out, _ = process.communicate(timeout=60)
    assert out == "script runs\n[5.0, 7.0]\n"
    assert process.returncode == 0


def test_nothing_outlives_a_killed_parent(tmp_path: Path) -> None:
    process = start(tmp_path, "hang")
    assert process.stdout is not None
    assert process.stdout.readline() == "script runs\n"
    pids = [int(word) for word in process.stdout.readline().split()[1:]]
    assert len(pids) == 2
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert all(is_gone(pid) for pid in pids)
