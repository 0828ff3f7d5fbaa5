import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a full disk: what this process writes beyond the first ``size`` bytes of a file is refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
