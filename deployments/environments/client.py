"""Calls the manager of environments from a router."""

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec

import ray

from conserve.errors import ApiError
from conserve.settings import Settings
from deployments.detached import actor_name, find_or_make
from deployments.environments.service import EnvironmentService
from deployments.messages import Refusal

Given = ParamSpec("Given")

_RESTARTING = ApiError(
    503,
    "the manager of environments is being restarted; try again",
    "unavailable",
    retry_after_s=2,
)
_CUT = ApiError(
    503,
    "the manager of environments was restarted while the command ran: it was ended, and may have "
    "run in part; try again if it may run twice",
    "command_cut",
    retry_after_s=2,
)
_PATIENCE_S = 20.0


class EnvironmentClient:
    """A router's client of the manager's actor, which it starts or finds.

    Methods that wait raise `ApiError` if the request fails or the manager stays away.
    """

    def __init__(self, application: str, settings: Settings) -> None:
        self._application = application
        self._settings = settings
        self._name = actor_name(application, "environments", settings)
        self._actor: Any = None

    async def declare(self, conversation_id: str, body: Any) -> Any:
        return await self._ask(EnvironmentService.declare, conversation_id, body)

    async def listed(self, conversation_id: str) -> Any:
        return await self._ask(EnvironmentService.listed, conversation_id)

    async def shown(self, conversation_id: str, name: str) -> Any:
        return await self._ask(EnvironmentService.shown, conversation_id, name)

    async def let_go(self, conversation_id: str, name: str) -> None:
        await self._ask(EnvironmentService.let_go, conversation_id, name)

    async def run(self, conversation_id: str, name: str, body: Any) -> Any:
        """Run a command; cancelling this ends it."""
        # This runs nothing, so it can be repeated until the manager lives.
        await self.shown(conversation_id, name)
        run_id = uuid.uuid4().hex
        try:
            return _checked(await self._connect().run.remote(run_id, conversation_id, name, body))
        except ray.exceptions.RayActorError:
            self._actor = None
            raise _CUT from None
        except asyncio.CancelledError:
            self._connect().cut.remote(run_id)
            raise

    def beat(self) -> None:
        """Tell the manager that a router lives, without waiting."""
        try:
            self._connect().beat.remote()
        except ray.exceptions.RayActorError:
            self._actor = None

    async def _ask(
        self,
        method: Callable[Concatenate[EnvironmentService, Given], Coroutine[Any, Any, Any]],
        *given: Given.args,
        **named: Given.kwargs,
    ) -> Any:
        """Call a method that can be repeated."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                remote = getattr(self._connect(), method.__name__).remote
                return _checked(await remote(*given, **named))
            except ray.exceptions.RayActorError:
                self._actor = None
                if time.monotonic() > deadline_s:
                    raise _RESTARTING from None
                await asyncio.sleep(0.1)

    def _connect(self) -> Any:
        if self._actor is None:
            self._actor = find_or_make(
                EnvironmentService, self._name, self._settings, self._application
            )
        return self._actor


def _checked(answer: Any) -> Any:
    if isinstance(answer, Refusal):
        raise ApiError(
            answer.status, answer.message, answer.code, retry_after_s=answer.retry_after_s
        )
    return answer
