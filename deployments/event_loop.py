"""An event loop that passes all turns' tokens on, its tasks, and threads beside it."""

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any

# Python's default is ten times as long, and a token may wait for it several times on its way.
_SWITCH_S = 0.0005
# The loop itself keeps weak references alone.
_tasks: set[asyncio.Task[None]] = set()


def give_way_soon() -> None:
    """Have this process's threads switch sooner, so that its event loop waits less for them."""
    sys.setswitchinterval(_SWITCH_S)


def in_background(work: Coroutine[Any, Any, None]) -> None:
    """Run work on this thread's event loop, and do not wait for it."""
    task = asyncio.get_running_loop().create_task(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
