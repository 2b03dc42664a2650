"""Waiting with a bound for what takes a moment."""

import asyncio
import time
from collections.abc import Callable


async def eventually(what: str, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for a condition; fails, naming it, if it does not come true."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.2)
