"""``/v1/conversations``: which are live, their ends, their tools, and the tools' environments."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from conserve import identity
from conserve.environments.spec import MOST_STDIN_CHARS
from conserve.errors import ApiError
from conserve.pausing import ToolReport
from conserve.pausing.tools import MOST_NAME_CHARS
from deployments import answers
from deployments.environments.client import EnvironmentClient
from deployments.router.access import caller_of
from deployments.router.errors import answer_response
from deployments.router.reading import disconnected, read_short
from deployments.table_client import TableClient

MOST_CALL_ID_CHARS = 128
EVENTS = ("start", "end")
_ALL = "/v1/conversations"
_ENVIRONMENTS = _ALL + "/{id:path}/environments"
_LISTED_AT_MOST = 10_000
_SHORT_BYTES = 64 * 1024
# A command with all that it reads, each character escaped.
_MOST_COMMAND_BYTES = 2 * MOST_STDIN_CHARS

_OFF = ApiError(
    404,
    "this server runs no commands; to let whoever may use it run some on its machine, set "
    "environments.enabled=true",
    "environments_disabled",
    final=True,
)


class Conversations:
    """The endpoints; ``environments`` is None where environments are off."""

    def __init__(self, table: TableClient, environments: EnvironmentClient | None) -> None:
        self._table = table
        self._environments = environments

    def routes(self) -> list[Route]:
        """Return them with those first that end in a word, since ids may hold slashes."""
        get, post, delete = ["GET"], ["POST"], ["DELETE"]
        return [
            Route(_ALL, self._list, methods=get),
            Route(_ALL + "/{id:path}/tools", self._report_tool, methods=post),
            Route(_ENVIRONMENTS, self._declare, methods=post),
            Route(_ENVIRONMENTS, self._list_environments, methods=get),
            Route(_ENVIRONMENTS + "/{env}", self._show_environment, methods=get),
            Route(_ENVIRONMENTS + "/{env}", self._remove, methods=delete),
            Route(_ENVIRONMENTS + "/{env}/run", self._run, methods=post),
            Route(_ALL + "/{id:name}", self._show, methods=get),
            Route(_ALL + "/{id:name}", self._release, methods=delete),
            Route("/programs/release", self._release_program, methods=post),
        ]

    async def _list(self, request: Request) -> Response:
        text = request.query_params.get("limit", "1000")
        # Only ASCII's digits, and few: `isdigit` holds of "²" too, and `int` refuses thousands.
        plain = text.isascii() and text.isdigit() and len(text) <= len(str(_LISTED_AT_MOST))
        if not plain or not 1 <= int(text) <= _LISTED_AT_MOST:
            raise ApiError(
                400, f"limit must be a number from 1 to {_LISTED_AT_MOST}", param="limit"
            )
        caller = caller_of(request.scope)
        # An admin's list has all tenants, unless it asks for one.
        all_tenants = caller is not None and caller.admin and "tenant" not in request.query_params
        tenant = None if all_tenants else _tenant(request)
        listed = await self._table.conversations(int(text), tenant)
        return Response(listed, media_type="application/json")

    async def _show(self, request: Request) -> Response:
        found = await self._table.conversation(_id(request))
        if found is None:
            raise _unknown_conversation()
        return answer_response(found)

    async def _release(self, request: Request) -> Response:
        if not await self._table.release(_id(request)):
            raise _unknown_conversation()
        return answer_response(answers.ConversationEnded(request.path_params["id"], True))

    async def _report_tool(self, request: Request) -> Response:
        id_ = _id(request)
        running = await self._table.report_tool(id_, _read_report(await _short_object(request)))
        if running is None:
            raise _unknown_conversation()
        return answer_response(answers.ToolsRunning(running))

    async def _release_program(self, request: Request) -> Response:
        program_id = (await _short_object(request)).get("program_id")
        if not isinstance(program_id, str) or not program_id:
            raise ApiError(400, "program_id must be a non-empty string", param="program_id")
        try:
            identity.explicit_id({}, {"program_id": program_id})
        except identity.InvalidConversationId as error:
            raise ApiError(400, str(error), param="program_id") from None
        id_ = identity.scoped(_tenant(request), program_id.strip())
        return answer_response(answers.ProgramReleased(program_id, await self._table.release(id_)))

    # --- environments -------------------------------------------------------------------------

    async def _declare(self, request: Request) -> Response:
        client, conversation_id = self._asked(request)
        if not identity.is_id(request.path_params["id"]):
            raise ApiError(
                400,
                f"a conversation's id has at most {identity.MAX_ID_CHARS} characters of printable "
                "ASCII",
                param="id",
            )
        body = await read_short(request, _MOST_COMMAND_BYTES, b"{}")
        return answer_response(await client.declare(conversation_id, body))

    async def _list_environments(self, request: Request) -> Response:
        client, conversation_id = self._asked(request)
        return answer_response(answers.Environments(await client.listed(conversation_id)))

    async def _show_environment(self, request: Request) -> Response:
        client, conversation_id = self._asked(request)
        return answer_response(await client.shown(conversation_id, request.path_params["env"]))

    async def _remove(self, request: Request) -> Response:
        client, conversation_id = self._asked(request)
        name = request.path_params["env"]
        await client.let_go(conversation_id, name)
        return answer_response(answers.EnvironmentRemoved(name, True))

    async def _run(self, request: Request) -> Response:
        client, conversation_id = self._asked(request)
        body = await read_short(request, _MOST_COMMAND_BYTES, b"{}")
        running = asyncio.ensure_future(
            client.run(conversation_id, request.path_params["env"], body)
        )
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
        conversation_id = _id(request)
        if self._environments is None:
            raise _OFF
        return self._environments, conversation_id


def _id(request: Request) -> str:
    """Return the id in a path, as it is kept."""
    return identity.scoped(_tenant(request), request.path_params["id"])


def _tenant(request: Request) -> str | None:
    """Return the tenant whose conversations a request is about; None where there are no keys."""
    caller, asked = caller_of(request.scope), request.query_params.get("tenant")
    if caller is None:
        if asked is not None:
            raise ApiError(400, "tenant: there are no tenants without keys", param="tenant")
        return None
    if asked in (None, caller.tenant):
        return caller.tenant
    if not caller.admin:
        raise ApiError(
            403,
            "only an admin key may ask for another tenant",
            "admin_key_required",
            param="tenant",
        )
    return asked


async def _short_object(request: Request) -> dict[str, Any]:
    body = await read_short(request, _SHORT_BYTES)
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


def _unknown_conversation() -> ApiError:
    return ApiError(
        404,
        "no live conversation has this id; it was never seen, or has ended",
        "conversation_not_found",
    )


def _read_report(body: dict[str, Any]) -> ToolReport:
    """Read a report that a tool begins, or has ended."""
    event = body.get("event")
    if event not in EVENTS:
        raise ApiError(400, 'event must be "start" or "end"', param="event")
    tool = _named("tool", body.get("tool"), MOST_NAME_CHARS)
    call_id = body.get("call_id")
    if call_id is not None:
        call_id = _named("call_id", call_id, MOST_CALL_ID_CHARS)
    return ToolReport(tool, call_id, ended=event == "end")


def _named(param: str, name: Any, most: int) -> str:
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= most
        or not (name.isascii() and name.isprintable())
    ):
        message = f"{param} must be a text of 1 to {most} characters of printable ASCII"
        raise ApiError(400, message, param=param)
    return name
