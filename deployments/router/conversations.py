"""``/v1/conversations``: which are live, their ends, their tools, and records of their turns."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from conserve import identity
from conserve.cache_account import MOST_MINUTES
from conserve.errors import ApiError
from conserve.pausing import ToolReport
from conserve.pausing.tools import MOST_NAME_CHARS
from deployments import answers
from deployments.router.access import RECORDING, caller_of
from deployments.router.errors import answer_response
from deployments.router.operators import MOST_DIGITS
from deployments.router.reading import read_short
from deployments.table_client import TableClient
from deployments.tables import Tables

MOST_CALL_ID_CHARS = 128
EVENTS = ("start", "end")
_ALL = "/v1/conversations"
_LISTED_AT_MOST = 10_000
_SHORT_BYTES = 64 * 1024


class Conversations:
    """The endpoints."""

    def __init__(self, table: TableClient | Tables) -> None:
        self._table = table

    def routes(self) -> list[Route]:
        """Return them with those first that end in a word, since ids may hold slashes."""
        get, post, delete = ["GET"], ["POST"], ["DELETE"]
        return [
            Route(_ALL, self._list, methods=get),
            Route(_ALL + "/{id:path}/tools", self._report_tool, methods=post),
            Route(_ALL + "/{id:name}", self._show, methods=get),
            Route(_ALL + "/{id:name}", self._release, methods=delete),
            Route("/programs/release", self._release_program, methods=post),
            Route("/v1/cache", self._cache, methods=get),
            Route(RECORDING, self._recording, methods=get),
        ]

    async def _list(self, request: Request) -> Response:
        limit = number(request, "limit", 1000, _LISTED_AT_MOST)
        listed = await self._table.conversations(limit, _tenants(request))
        return Response(listed, media_type="application/json")

    async def _cache(self, request: Request) -> Response:
        minutes = number(request, "minutes", MOST_MINUTES, MOST_MINUTES)
        return answer_response(
            await (self._one(request) if "model" in request.query_params else self._table).cache(
                minutes, _tenants(request)
            )
        )

    async def _recording(self, request: Request) -> Response:
        after = number(request, "after", 0, 10**MOST_DIGITS - 1, least=0)
        return answer_response(await self._one(request).recording(after, _tenants(request)))

    def _one(self, request: Request) -> TableClient:
        """Return the table of the model that a request is about; of several it has to name one."""
        if isinstance(self._table, TableClient):
            return self._table
        table = self._table.of.get(request.query_params.get("model", ""))
        if table is None:
            names = " or ".join(self._table.of)
            raise ApiError(400, f"model: there are several here; ask with {names}", param="model")
        return table

    async def _show(self, request: Request) -> Response:
        found = await self._table.conversation(conversation_id(request))
        if found is None:
            raise _unknown_conversation()
        return answer_response(found)

    async def _release(self, request: Request) -> Response:
        if not await self._table.release(conversation_id(request)):
            raise _unknown_conversation()
        return answer_response(answers.ConversationEnded(request.path_params["id"], True))

    async def _report_tool(self, request: Request) -> Response:
        id_ = conversation_id(request)
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


def conversation_id(request: Request) -> str:
    """Return the id in a path, as it is kept."""
    return identity.scoped(_tenant(request), request.path_params["id"])


def number(request: Request, name: str, default: int, most: int, least: int = 1) -> int:
    """Return the number that a request's query gives, or the default; raises `ApiError`."""
    text = request.query_params.get(name, str(default))
    # Only ASCII's digits, and few: `isdigit` holds of "²" too, and `int` refuses thousands.
    plain = text.isascii() and text.isdigit() and len(text) <= len(str(most))
    if not plain or not least <= int(text) <= most:
        raise ApiError(400, f"{name} must be a number from {least} to {most}", param=name)
    return int(text)


def _tenants(request: Request) -> str | None:
    """Return the tenant that a list is about; None: all, for an admin that asks for no other."""
    caller = caller_of(request.scope)
    all_tenants = caller is not None and caller.admin and "tenant" not in request.query_params
    return None if all_tenants else _tenant(request)


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
