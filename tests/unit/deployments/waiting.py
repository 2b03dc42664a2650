"""Waits for what threads and other processes do meanwhile."""

import time
from collections.abc import Callable


def eventually(holds: Callable[[], object]) -> None:
    """Return once it holds; fails after half a minute."""
    deadline_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
