"""Background tasks of a process's event loop, and how soon other threads yield to it."""

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any

# Python's default is ten times as long, and a token may wait for it several times on its way.
_SWITCH_S = 0.0005
# Keeps references to running tasks: the event loop has weak ones only.
_tasks: set[asyncio.Task[None]] = set()


def switch_threads_sooner() -> None:
    """Shorten the time after which Python switches threads, for the event loop's latency."""
    sys.setswitchinterval(_SWITCH_S)


def in_background(work: Coroutine[Any, Any, None]) -> None:
    """Start a coroutine on this thread's event loop without waiting for it."""
    task = asyncio.get_running_loop().create_task(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
