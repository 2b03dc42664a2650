"""Processes that want cores, as a machine's other work would."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

_HOG = "while True: pass"


@contextlib.contextmanager
def hogs(count: int) -> Iterator[None]:
    """Keep so many processes computing for the time of a ``with`` block.

    Each takes as much of a core as the operating system gives to one more process.
    """
    processes = [subprocess.Popen([sys.executable, "-c", _HOG]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
