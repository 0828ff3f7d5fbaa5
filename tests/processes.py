import time
from pathlib import Path


def is_gone(pid: int, within_s: float = 5) -> bool:
    """Whether process ``pid`` ends soon; a zombie has ended."""
    limit = time.monotonic() + within_s
    while time.monotonic() < limit:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False
