"""The scheduler, from the replica that has the engine's client: what it is told, what it says."""

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import msgspec

from conserve.direct import Notice
from conserve.engine_scheduling.load import SchedulerLoad
from conserve.wire import history_key
from deployments.engine.scheduler.commands import command

logger = logging.getLogger("ray.serve")


class SchedulerClient:
    """Of one engine with ``engine_scheduler: conversation``.

    Args:
        client: vLLM's ``AsyncLLM``.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()

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
            task = asyncio.get_running_loop().create_task(self._release(keys, to))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def load(self) -> SchedulerLoad | None:
        """What is with it; None if it does not say."""
        try:
            return msgspec.convert(await command(self._client, "observe"), SchedulerLoad)
        except Exception as error:
            # A beat goes without it; whether the engine lives is looked after elsewhere.
            logger.warning("the engine's scheduler does not say what it does: %s", error)
            return None

    async def _release(self, keys: list[str], to: str) -> None:
        try:
            await command(self._client, "release", keys=keys, to=to)
        except Exception as error:
            # Their blocks go by themselves, later.
            logger.warning("the engine's scheduler did not release %d: %s", len(keys), error)
