"""``/v1/conversations/{id}/environments``: where the tools of a conversation's agent run."""

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from conserve import identity
from conserve.environments.spec import MOST_STDIN_CHARS
from conserve.errors import ApiError
from deployments import answers
from deployments.environments.client import EnvironmentClient
from deployments.router.reading import read_short
from deployments.router.responses import answer_response

_OF = "/v1/conversations/{id:path}/environments"
# A command with all that it reads, each character escaped.
_MOST_BODY_BYTES = 2 * MOST_STDIN_CHARS

_OFF = ApiError(
    404,
    "this server runs no commands; to let whoever may use it run some on its machine, set "
    "environments.enabled=true",
    "environments_disabled",
    final=True,
)


class Environments:
    """The endpoints.

    Args:
        client: None where environments are off.
        tenant_of: whose conversations a request is about; raises for what it may not ask for.
    """

    def __init__(
        self, client: EnvironmentClient | None, tenant_of: Callable[[Request], str | None]
    ) -> None:
        self._client = client
        self._tenant_of = tenant_of

    def routes(self) -> list[Route]:
        """They come before those of the conversations, whose ids may hold slashes."""
        return [
            Route(_OF, self._declare, methods=["POST"]),
            Route(_OF, self._list, methods=["GET"]),
            Route(_OF + "/{env}", self._show, methods=["GET"]),
            Route(_OF + "/{env}", self._remove, methods=["DELETE"]),
            Route(_OF + "/{env}/run", self._run, methods=["POST"]),
        ]

    async def _declare(self, request: Request) -> Response:
        client, conversation_id = self._asked(request)
        if not identity.is_id(request.path_params["id"]):
            raise ApiError(
                400,
                f"a conversation's id has at most {identity.MAX_ID_CHARS} characters of printable "
                "ASCII",
                param="id",
            )
        body = await read_short(request, _MOST_BODY_BYTES, b"{}")
        return answer_response(await client.declare(conversation_id, body))

    async def _list(self, request: Request) -> Response:
        client, conversation_id = self._asked(request)
        found = await client.listed(conversation_id)
        return answer_response(answers.Environments(found))

    async def _show(self, request: Request) -> Response:
        client, conversation_id = self._asked(request)
        return answer_response(await client.shown(conversation_id, request.path_params["env"]))

    async def _remove(self, request: Request) -> Response:
        client, conversation_id = self._asked(request)
        name = request.path_params["env"]
        await client.let_go(conversation_id, name)
        return answer_response(answers.EnvironmentRemoved(name, True))

    async def _run(self, request: Request) -> Response:
        client, conversation_id = self._asked(request)
        body = await read_short(request, _MOST_BODY_BYTES, b"{}")
        running = asyncio.ensure_future(
            client.run(conversation_id, request.path_params["env"], body)
        )
        left = asyncio.ensure_future(_leaves(request))
        try:
            await asyncio.wait([running, left], return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                return Response(status_code=400)  # Nobody reads it.
            return answer_response(running.result())
        finally:
            for task in (running, left):
                task.cancel()

    def _asked(self, request: Request) -> tuple[EnvironmentClient, str]:
        """Raises:
        ApiError: there are no environments, or the caller may not ask for this tenant's.
        """
        tenant = self._tenant_of(request)
        if self._client is None:
            raise _OFF
        return self._client, identity.scoped(tenant, request.path_params["id"])


async def _leaves(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
