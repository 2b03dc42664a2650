"""How routers and engines call the conversation table."""

import asyncio
import time
from typing import Any

import ray

from conserve.conversations import MEMORY_ENVIRONMENT
from conserve.settings import Settings
from deployments.detached import actor_name, find_or_make
from deployments.table.table import TableService


class TableUnavailable(Exception):
    """The conversation table did not answer in time; Ray is starting it again."""


class TableClient:
    """A caller's end of the table: finds the actor, and waits while Ray starts it again."""

    def __init__(self, application: str, settings: Settings) -> None:
        self._name = actor_name(application, "table", settings)
        self._settings = settings
        self._actor: Any = None

    async def call(
        self,
        method: str,
        *arguments: Any,
        patience_s: float = 30.0,
        answer_s: float | None = None,
    ) -> Any:
        """Call a method of `TableService`.

        Args:
            patience_s: how long to wait for a table that is down.
            answer_s: how long to wait for one that lives and does not answer; None: for as long as
                it takes, as with what waits for room.

        Raises:
            TableUnavailable: it stayed down, or did not answer.
        """
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                async with asyncio.timeout(answer_s):
                    return await getattr(self._connect(), method).remote(*arguments)
            except TimeoutError:
                raise TableUnavailable(
                    f"the conversation table did not answer within {answer_s:g} s"
                ) from None
            except ray.exceptions.RayActorError as error:
                self._actor = None
                if time.monotonic() > deadline_s:
                    raise TableUnavailable(
                        f"the conversation table is down: {type(error).__name__}"
                    ) from error
                await asyncio.sleep(0.1)

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method without waiting; what it would have returned or raised is dropped."""
        try:
            getattr(self._connect(), method).remote(*arguments)
        except ray.exceptions.RayActorError:
            self._actor = None

    def _connect(self) -> Any:
        if self._actor is None:
            self._actor = find_or_make(
                TableService, self._name, self._settings, environment=MEMORY_ENVIRONMENT
            )
        return self._actor
