"""A decoder's calls to the conversation table, beside its turns and never in their way."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from conserve.clock import unix_s
from conserve.direct import Desk, Notice
from conserve.wire import BEAT_S
from deployments.table_client import TableClient, TableUnavailable

logger = logging.getLogger("ray.serve")

Answer = TypeVar("Answer")


@dataclass(eq=False)
class Reporter:
    """Tells the table what the desk's outbox holds, and the desk what the table says.

    Reports go one at a time, so that they arrive in order; what happens meanwhile goes with the
    next. ``obey`` is told each notice, too, for the engine itself.
    """

    engine_id: str
    table: TableClient
    desk: Desk
    obey: Callable[[Notice], None] = lambda _: None
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _due: asyncio.Event = field(default_factory=asyncio.Event)
    _registered: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.tasks = [loop.create_task(self._report()), loop.create_task(self._hear())]

    def registering(self) -> int:
        """Stop until `registered`; returns the number of the registration to come."""
        self._registered.clear()
        self.desk.stop()
        return self.desk.outbox.register()

    def registered(self) -> None:
        self._registered.set()

    @property
    def is_registered(self) -> bool:
        return self._registered.is_set()

    def has_more(self) -> None:
        self._due.set()

    async def _report(self) -> None:
        outbox = self.desk.outbox
        while True:
            await self._due.wait()
            await self._registered.wait()
            report, registration = outbox.next(), outbox.registration
            if report is None:
                self._due.clear()
                continue
            asked = self.table.report(self.engine_id, registration, report)
            answers, parks = await self._answered(asked)
            if registration != outbox.registration or not answers:
                continue
            if parks is None:
                self._unknown()
                continue
            outbox.answered(report.number)
            self.desk.parks = bool(parks)

    async def _hear(self) -> None:
        outbox = self.desk.outbox
        while True:
            await self._registered.wait()
            asked_s, registration = unix_s(), outbox.registration
            asked = self.table.hear(self.engine_id, registration, outbox.heard)
            answers, notice = await self._answered(asked)
            if not answers or registration != outbox.registration:
                continue
            if notice is None:
                self._unknown()
                continue
            self.desk.hear(notice, asked_s)
            try:
                self.obey(notice)
            except Exception:
                # An engine that hears no more notices would keep what the table has given away.
                logger.exception("decoder %s: a notice was not obeyed", self.engine_id)
            self._due.set()

    async def _answered(
        self, asked: Coroutine[Any, Any, Answer]
    ) -> tuple[Literal[True], Answer] | tuple[Literal[False], None]:
        try:
            return True, await asked
        except TableUnavailable as error:
            logger.warning("decoder %s: %s", self.engine_id, error)
        except Exception:
            # The loops go on: without reports the table would never know that a turn has ended.
            logger.exception("decoder %s: a call to the table failed", self.engine_id)
            await asyncio.sleep(BEAT_S)
        return False, None

    def _unknown(self) -> None:
        """Stop until the next beat, which finds that the table does not know this engine."""
        self._registered.clear()
        self.desk.stop()
