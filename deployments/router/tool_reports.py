"""Reads what clients report of their tools (`POST /v1/conversations/{id}/tools`)."""

from typing import Any

from conserve.errors import ApiError
from conserve.pausing import ToolReport
from conserve.pausing.tools import MOST_NAME_CHARS

MOST_CALL_ID_CHARS = 128
EVENTS = ("start", "end")


def read_report(body: dict[str, Any]) -> ToolReport:
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
