"""The router's side: the paths of environments, and the client of their manager's actor."""

import asyncio
import hashlib
import uuid
from typing import Any

import ray
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from conserve import identity
from conserve.errors import ApiError
from conserve.settings import Settings
from conserve_tools import answers
from conserve_tools.service import EnvironmentService
from conserve_tools.spec import MOST_STDIN_CHARS, LimitsAsked, Run, Spec
from deployments.detached import ActorClient, Patience, asks, call, find_or_make, unrefused
from deployments.router.addons import Described
from deployments.router.conversations import conversation_id
from deployments.router.errors import answer_response
from deployments.router.reading import disconnected, read_short

_PATH = "/v1/conversations/{id:path}/environments"
# A command with all that it reads, each character escaped.
_MOST_COMMAND_BYTES = 2 * MOST_STDIN_CHARS

_OFF = ApiError(
    404,
    "this server runs no commands; to let whoever may use it run some on its machine, set "
    "environments.enabled=true",
    "environments_disabled",
    final=True,
)

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


class EnvironmentPaths:
    """The endpoints; ``manager`` is None where environments are off."""

    def __init__(self, manager: EnvironmentClient | None) -> None:
        self._manager = manager

    def routes(self) -> list[Route]:
        get, post, delete = ["GET"], ["POST"], ["DELETE"]
        return [
            Route(_PATH, self._declare, methods=post),
            Route(_PATH, self._list, methods=get),
            Route(_PATH + "/{env}", self._show, methods=get),
            Route(_PATH + "/{env}", self._remove, methods=delete),
            Route(_PATH + "/{env}/run", self._run, methods=post),
        ]

    def beat(self) -> None:
        if self._manager is not None:
            self._manager.beat()

    async def _declare(self, request: Request) -> Response:
        manager, id_ = self._asked(request)
        if not identity.is_id(request.path_params["id"]):
            raise ApiError(
                400,
                f"a conversation's id has at most {identity.MAX_ID_CHARS} characters of printable "
                "ASCII",
                param="id",
            )
        body = await read_short(request, _MOST_COMMAND_BYTES, b"{}")
        return answer_response(await manager.declare(id_, body))

    async def _list(self, request: Request) -> Response:
        manager, id_ = self._asked(request)
        return answer_response(answers.Environments(await manager.listed(id_)))

    async def _show(self, request: Request) -> Response:
        manager, id_ = self._asked(request)
        return answer_response(await manager.shown(id_, request.path_params["env"]))

    async def _remove(self, request: Request) -> Response:
        manager, id_ = self._asked(request)
        name = request.path_params["env"]
        await manager.let_go(id_, name)
        return answer_response(answers.EnvironmentRemoved(name, True))

    async def _run(self, request: Request) -> Response:
        manager, id_ = self._asked(request)
        body = await read_short(request, _MOST_COMMAND_BYTES, b"{}")
        running = asyncio.ensure_future(manager.run(id_, request.path_params["env"], body))
        left = asyncio.ensure_future(disconnected(request.receive))
        try:
            await asyncio.wait([running, left], return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                return Response(status_code=400)  # The client has left.
            return answer_response(running.result())
        finally:
            for task in (running, left):
                task.cancel()

    def _asked(self, request: Request) -> tuple[EnvironmentClient, str]:
        id_ = conversation_id(request)
        if self._manager is None:
            raise _OFF
        return self._manager, id_


# --- for `/openapi.json` --------------------------------------------------------------------------

_OPERATIONS = """
post /v1/conversations/{id}/environments createEnvironment EnvironmentAsked>Environment 409 429 \
501 | Make an environment for tools, if the setting environments.enabled allows it
get /v1/conversations/{id}/environments listEnvironments Environments | A conversation's own
get /v1/conversations/{id}/environments/{env} getEnvironment Environment | One environment
delete /v1/conversations/{id}/environments/{env} removeEnvironment EnvironmentRemoved | Remove one
post /v1/conversations/{id}/environments/{env}/run runCommand CommandAsked>CommandDone 409 429 \
501 | Run a command in an environment
"""
_ENVIRONMENT = Spec.model_json_schema()
_ENVIRONMENT["properties"]["limits"] = {
    "anyOf": [LimitsAsked.model_json_schema(), {"type": "null"}]
}
del _ENVIRONMENT["$defs"]  # The limits of a whole application.
_NAME = {"type": "string", "pattern": _ENVIRONMENT["properties"]["name"]["pattern"]}

DESCRIBED = Described(
    operations=_OPERATIONS,
    answers=(
        answers.Environment, answers.Environments, answers.EnvironmentRemoved, answers.CommandDone,
    ),
    bodies={"EnvironmentAsked": _ENVIRONMENT, "CommandAsked": Run.model_json_schema()},
    parameters={"env": _NAME},
)  # fmt: skip
