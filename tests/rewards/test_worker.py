import subprocess
import sys


def test_a_worker_is_light() -> None:
    code = "import sys, verl.rewards.worker; print([m for m in ('torch', 'transformers', 'sympy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
