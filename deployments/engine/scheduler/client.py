"""The scheduler, from the replica that has the engine's client: what it is told, what it says."""

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

import msgspec

from conserve.direct import Notice
from conserve.engine_scheduling.calls import SchedulerLoad
from conserve.wire import history_key
from deployments.engine.scheduler.commands import command

logger = logging.getLogger("ray.serve")

# To release one is looked for in all that the scheduler knows. A thousand at a time would hold up
# a step; between two commands the engine goes on.
_AT_ONCE = 16


class SchedulerClient:
    """Talks with the scheduler of one engine with ``engine_scheduler: conversation``.

    Args:
        client: vLLM's ``AsyncLLM``.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()
        self._said: SchedulerLoad | None = None
        self._asks = False

    def hear(self, notice: Notice) -> None:
        """A notice of the table: what was paused, or has ended, is the next to be evicted.

        Nobody waits for it: the turn of such a history is not begun here any more.
        """
        self.release(notice.given_up, "front")
        self.release(notice.ended, "front")

    def release(self, histories: Iterable[tuple[str, int]], to: str) -> None:
        """Have histories' blocks go, soon."""
        keys = [history_key(history_id, incarnation) for history_id, incarnation in histories]
        if keys:
            self._begin(self._release(keys, to))

    def hold(self, holds: Iterable[tuple[str, int, float]]) -> None:
        """Have idle histories' blocks held for so many seconds from now on, soon."""
        for_s = {history_key(one, incarnation): hold_s for one, incarnation, hold_s in holds}
        if for_s:
            self._begin(self._hold(for_s))

    def load(self) -> SchedulerLoad | None:
        """Return what it has said last, once, and have it say more, for the next time.

        Nobody waits for the answer: it comes between two steps, and a step may take longer than the
        table waits for an engine's beat.
        """
        said, self._said = self._said, None
        if not self._asks:
            self._asks = True
            self._begin(self._ask())
        return said

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self) -> None:
        try:
            said = await command(self._client, "observe")
            self._said = msgspec.convert(said, SchedulerLoad)
        except Exception as error:
            # Beats go without it; whether the engine lives is looked after elsewhere.
            logger.warning("the engine's scheduler does not say what it does: %s", error)
        finally:
            self._asks = False

    async def _hold(self, for_s: dict[str, float]) -> None:
        keys = list(for_s)
        try:
            for at in range(0, len(keys), _AT_ONCE):
                some = {key: for_s[key] for key in keys[at : at + _AT_ONCE]}
                await command(self._client, "pin", for_s=some)
        except Exception as error:
            # What is held is held as its own averages have it.
            logger.warning("the engine's scheduler did not hold %d: %s", len(keys), error)

    async def _release(self, keys: list[str], to: str) -> None:
        try:
            for at in range(0, len(keys), _AT_ONCE):
                await command(self._client, "release", keys=keys[at : at + _AT_ONCE], to=to)
        except Exception as error:
            # Their blocks go by themselves, later.
            logger.warning("the engine's scheduler did not release %d: %s", len(keys), error)
