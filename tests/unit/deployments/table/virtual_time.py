"""An event loop on which waiting takes no time: the clock jumps to what comes next."""

import asyncio
import functools
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class _Clock(selectors.SelectSelector):
    """Waits for nothing but the time, which passes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits for somebody else")
        self.now_s += max(0.0, timeout)
        return []


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: _Clock) -> None:
        super().__init__(clock)
        self._clock = clock

    def time(self) -> float:
        return self._clock.now_s


@contextmanager
def _clock_of(clock: _Clock) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: clock.now_s)
        yield


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run a scenario to its end, with `time.monotonic` on the loop's clock.

    Raises:
        RuntimeError: it waits for what never comes.
    """
    clock = _Clock()
    loop = _Loop(clock)
    with _clock_of(clock):
        try:
            loop.run_until_complete(scenario)
        finally:
            loop.run_until_complete(_cancel(asyncio.all_tasks(loop)))
            loop.close()


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Have a test `run`."""

    @functools.wraps(test)
    def runs(*given: Any, **more: Any) -> None:
        run(test(*given, **more))

    return runs


async def _cancel(left: set["asyncio.Task[Any]"]) -> None:
    """A task that is collected later would complain in another test."""
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
