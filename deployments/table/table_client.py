"""How routers and engines call the conversation table."""

import asyncio
import hashlib
import time
from typing import Any

import ray

from conserve.conversations import MEMORY_ENVIRONMENT
from conserve.settings import Settings
from deployments.messages import HEAD_NODE
from deployments.table.table import TableService


class TableUnavailable(Exception):
    """The conversation table did not answer in time; Ray is starting it again."""


class TableClient:
    """A caller's end of the table: finds the actor, and waits while Ray starts it again."""

    def __init__(self, application: str, settings: Settings) -> None:
        # Other settings, another table: an actor that lives on would keep those it has.
        digest = hashlib.sha256(settings.model_dump_json().encode()).hexdigest()[:8]
        self._name = f"conserve:{application}:table:{digest}"
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
            self._actor = (
                ray.remote(TableService)
                .options(
                    name=self._name,
                    namespace="serve",
                    get_if_exists=True,
                    # It outlives the replica that happened to start it, and ends itself when
                    # all are gone (ABANDONED_S).
                    lifetime="detached",
                    max_restarts=-1,
                    max_concurrency=100_000,
                    num_cpus=0,
                    # Where the routers are: other nodes may come and go.
                    resources={HEAD_NODE: 0.001},
                    runtime_env={"env_vars": MEMORY_ENVIRONMENT},
                )
                .remote(self._settings)
            )
        return self._actor
