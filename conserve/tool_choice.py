"""Resolves a chat's choice of tools to what engines know.

vLLM 0.29 knows ``auto``, ``none``, ``required`` and the name of a function. OpenAI's
``allowed_tools`` it refuses (https://github.com/vllm-project/vllm/issues/23334), so such a chat is
sent with these tools alone.
"""

from collections.abc import Mapping
from typing import Any

from conserve.apis import CHAT
from conserve.errors import ApiError

_FIELD = "tool_choice"
_ALLOWED = f"{_FIELD}.allowed_tools"
_MODES = ("auto", "required")


def resolved(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return a request whose ``tool_choice`` engines know, with the tools that it may call.

    It is the same object for other APIs, and if engines know the choice, or refuse it themselves.

    Raises:
        ApiError: 400, it chooses tools that are not served, or not among its tools.
    """
    choice = body.get(_FIELD)
    if path != CHAT or not isinstance(choice, dict):
        return body
    kind = choice.get("type")
    if kind == "allowed_tools":
        return _with_allowed(body, choice.get("allowed_tools"))
    if isinstance(kind, str) and kind != "function":
        raise ApiError(
            400,
            f"{_FIELD}.type {kind[:40]!r} is not served; choose a function by type "
            '"function", or some of them by "allowed_tools"',
            "unsupported_value",
            param=f"{_FIELD}.type",
        )
    return body


def _with_allowed(body: dict[str, Any], choice: Any) -> dict[str, Any]:
    if not isinstance(choice, dict):
        raise _unfit(_ALLOWED, "must be an object with a mode and tools")
    mode, listed, tools = choice.get("mode"), choice.get("tools"), body.get("tools")
    if mode not in _MODES:
        raise _unfit(f"{_ALLOWED}.mode", f"must be {' or '.join(_MODES)}")
    where = f"{_ALLOWED}.tools"
    if not isinstance(listed, list) or not listed:
        raise _unfit(
            where, f'must be a list with at least one tool; for none send {_FIELD}: "none"'
        )
    if not isinstance(tools, list):
        raise ApiError(400, f"{_ALLOWED} allows some of tools; send these too", param="tools")
    names = {_required_name(one, f"{where}[{position}]") for position, one in enumerate(listed)}
    kept = [tool for tool in tools if _name_of(tool) in names]
    missing = names - {_name_of(tool) for tool in kept}
    if missing:
        raise _unfit(where, f"names {min(missing)[:100]!r}, which is not one of tools")
    return {**body, "tools": kept, _FIELD: mode}


def _required_name(tool: Any, where: str) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise _unfit(f"{where}.type", f"is {kind[:40]!r}, and only functions are served")
    name = _name_of(tool)
    if name is None:
        raise _unfit(where, 'must be {"type": "function", "function": {"name": ...}}')
    return name


def _name_of(tool: Any) -> str | None:
    """Return the name of a function; None for other tools."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _unfit(where: str, what: str) -> ApiError:
    return ApiError(400, f"{where} {what}", param=where)
