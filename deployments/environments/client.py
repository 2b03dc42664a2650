"""Calls the manager of environments from a router."""

import asyncio
import hashlib
import uuid
from typing import Any

import ray

from conserve.errors import ApiError
from conserve.settings import Settings
from deployments.detached import ActorClient, Patience, asks, call, find_or_make, unrefused
from deployments.environments.service import EnvironmentService

_RESTARTING = ApiError(
    503, "the manager of environments is being restarted; try again", "unavailable", retry_after_s=2
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
    """A router's client of the manager's actor, which it starts or finds.

    Methods that wait raise `ApiError` if the request fails or the manager stays away.
    """

    def __init__(self, application: str, deployment: str, settings: Settings) -> None:
        self._application = application
        self._deployment = deployment
        self._settings = settings
        # It stays through deployments that change nothing of it, with what runs in environments.
        said = f"{settings.environments.model_dump_json()}{settings.port}"
        digest = hashlib.sha256(said.encode()).hexdigest()[:8]
        self._name = f"conserve:{application}:environments:{digest}"

    declare = asks(EnvironmentService.declare, _USUAL)
    listed = asks(EnvironmentService.listed, _USUAL)
    shown = asks(EnvironmentService.shown, _USUAL)
    let_go = asks(EnvironmentService.let_go, _USUAL)

    async def run(self, conversation_id: str, name: str, body: Any) -> Any:
        """Run a command; cancelling this ends it."""
        # This runs nothing, so it can be repeated until the manager lives.
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
        """Tell the manager that a router lives, without waiting."""
        self._tell(EnvironmentService.beat)

    def _unavailable(self, why: str) -> Exception:
        return _RESTARTING

    def _connect(self) -> Any:
        if self._actor is None:
            self._actor = find_or_make(
                EnvironmentService, self._name,
                self._settings, self._application, self._deployment,
            )  # fmt: skip
        return self._actor
