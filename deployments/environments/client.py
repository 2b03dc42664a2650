"""How routers call the manager of environments."""

import asyncio
import uuid
from typing import Any

import ray

from conserve.errors import ApiError
from conserve.settings import Settings
from deployments.detached import ActorClient, Patience, actor_name, call, find_or_make
from deployments.environments.service import EnvironmentService
from deployments.messages import unrefused

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
_USUAL = Patience(20.0)


class EnvironmentClient(ActorClient):
    """A router's end of the manager: makes the actor if it is the first, and finds it again.

    All methods that wait raise `ApiError` where what was asked for cannot be had, or the manager
    stays away.
    """

    def __init__(self, application: str, settings: Settings) -> None:
        self._application = application
        self._settings = settings
        self._name = actor_name(application, "environments", settings)

    async def declare(self, conversation_id: str, body: Any) -> Any:
        """See `Manager.declare`."""
        return await self._ask(_USUAL, EnvironmentService.declare, conversation_id, body)

    async def listed(self, conversation_id: str) -> Any:
        """See `Manager.listed`."""
        return await self._ask(_USUAL, EnvironmentService.listed, conversation_id)

    async def shown(self, conversation_id: str, name: str) -> Any:
        """See `Manager.shown`."""
        return await self._ask(_USUAL, EnvironmentService.shown, conversation_id, name)

    async def let_go(self, conversation_id: str, name: str) -> None:
        """See `Manager.let_go`."""
        await self._ask(_USUAL, EnvironmentService.let_go, conversation_id, name)

    async def run(self, conversation_id: str, name: str, body: Any) -> Any:
        """Have a command run; where this is cancelled, it is ended.

        Raises:
            ApiError: it cannot be run, or what became of it is not known.
        """
        # What does not run anything may be asked twice; from now on the manager is known to live.
        await self.shown(conversation_id, name)
        run_id = uuid.uuid4().hex
        try:
            running = call(
                self._connect(), EnvironmentService.run, run_id, conversation_id, name, body
            )
            return unrefused(await running)
        except ray.exceptions.RayActorError:
            self._actor = None
            raise _CUT from None
        except asyncio.CancelledError:
            self._tell(EnvironmentService.cut, run_id)
            raise

    def beat(self) -> None:
        """Tell the manager that a router lives; whether it hears is not awaited."""
        self._tell(EnvironmentService.beat)

    def _unavailable(self, why: str) -> Exception:
        return _RESTARTING

    def _connect(self) -> Any:
        if self._actor is None:
            self._actor = find_or_make(
                EnvironmentService, self._name, self._settings, self._application
            )
        return self._actor
