"""Checks the items of Messages and Responses, and counts them.

vLLM 0.32 checks an item of ``/v1/responses`` against some thirty types: 0.1 ms each on two slow
cores, and 2 ms if none fits. So what cannot be served is refused here, with the item and the
reason, and the number of items is bounded. Accepted items are converted by
`conserve.canonical_items`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from conserve.errors import ApiError, unfit
from conserve.served import require_continuable, require_served_block

ITEMS_A_PART = 3
# Cost of an item for vLLM, in messages of a chat (3 us).
_ITEM_COSTS = {"message": 30, "function_call_output": 30, "function_call": 6, "reasoning": 6}
# Together some 100 ms; 700 turns fit, each of a call, its result and its reasoning.
MOST_RESPONSE_ITEMS = 32_768

# An item that names another one, which a decoder keeps; see `deployments.router.stored`.
REFERENCE = "item_reference"

_ROLES = ("user", "assistant", "system", "developer")
_STATUSES = (None, "in_progress", "completed", "incomplete")
_PHASES = (None, "commentary", "final_answer")
_DETAILS = (None, "auto", "low", "high", "original")
_INPUT_PARTS = ("input_text", "input_image")
# An assistant's messages that clients write themselves have input parts.
_ASSISTANT_PARTS = ("output_text", "refusal", "input_text")
_REASONING_PARTS = ("reasoning_text", "summary_text")
# The member of a part that has to be a text.
TEXTS = {
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "reasoning_text": "text",
    "summary_text": "text",
}
# Tools that are shown to the model: a function, and functions under a common name.
FUNCTION, NAMESPACE = "function", "namespace"
_TOOL_CHOICES = (None, "auto", "none", "required")
_ALLOWED_MODES = ("auto", "required")
# Kinds of tools that are left out are listed in a header.
_KIND = re.compile(r"[a-z0-9_]{1,64}")

_RESPONSE = "resp_"
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_ITEM_ID = re.compile(r"[a-z]+_(.+)_[0-9]+")


def message_items(body: Mapping[str, Any]) -> int:
    """Count the messages of a request of ``/v1/messages``, parts as `ITEMS_A_PART` each.

    Raises ApiError (400) for a block that has the wrong form, or is not served.
    """
    messages = body["messages"]
    items = len(messages) + ITEMS_A_PART * _blocks(body.get("system"), "system", "system")
    for position, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            where = f"messages[{position}].content"
            items += ITEMS_A_PART * _blocks(content, where, message["role"])
    require_continuable(body)
    return items


def _blocks(content: Any, where: str, role: str) -> int:
    if not isinstance(content, list):
        return 0
    count = len(content)
    for position, block in enumerate(content):
        if not isinstance(block, dict):
            raise ApiError(400, f"{where} must be a string or a list of blocks", param=where)
        # Text is allowed anywhere, and most blocks are text.
        if block.get("type") != "text":
            require_served_block(block, f"{where}[{position}]", role)
        inner = block.get("content")
        if isinstance(inner, list):
            count += len(inner)
    return count


def response_items(body: Mapping[str, Any]) -> int:
    """Return what a request of ``/v1/responses`` costs to read, in messages of a chat."""
    given = body.get("input")
    if isinstance(given, str):
        return 1
    if not isinstance(given, list) or not given:
        raise unfit("input", "must be a string or a list with at least one item")
    return sum(_item(item, f"input[{position}]") for position, item in enumerate(given))


def _item(item: Any, where: str) -> int:
    if not isinstance(item, dict):
        raise unfit(where, "must be an object")
    kind = item.get("type")
    if kind is None:
        if "role" not in item and "id" in item:
            raise unfit(f"{where}.type", f"must be {REFERENCE} where an item is named by its id")
        kind = "message"
    cost = _ITEM_COSTS.get(kind) if isinstance(kind, str) else None
    if cost is None:
        raise _unserved(f"{where}.type", f"items of type {_shown(kind)}", _ITEM_COSTS)
    _require_text(item, where, "id", optional=True)
    _require_one_of(item, where, "status", _STATUSES)
    if kind == "message":
        _require_one_of(item, where, "role", _ROLES)
        _require_one_of(item, where, "phase", _PHASES)
        allowed = _ASSISTANT_PARTS if item["role"] == "assistant" else _INPUT_PARTS
        return cost + _parts(item.get("content"), f"{where}.content", allowed)
    if kind == "reasoning":
        if item.get("encrypted_content"):
            raise unfit(
                f"{where}.encrypted_content",
                "can be read by the server alone that has made it; leave this item out",
            )
        for name in ("summary", "content"):
            if item.get(name) is not None:
                cost += _parts(item[name], f"{where}.{name}", _REASONING_PARTS, text=False)
        return cost
    _require_text(item, where, "call_id")
    _require_text(item, where, "namespace", optional=True)
    if kind == "function_call_output":
        _require_text(item, where, "name", optional=True)
        return cost + _parts(item.get("output"), f"{where}.output", _INPUT_PARTS)
    _require_text(item, where, "name")
    _require_text(item, where, "arguments")
    return cost


def _parts(content: Any, where: str, allowed: tuple[str, ...], *, text: bool = True) -> int:
    if text and isinstance(content, str):
        return 0
    if not isinstance(content, list):
        raise unfit(where, f"must be {'a string or ' * text}a list of parts")
    for position, part in enumerate(content):
        _part(part, f"{where}[{position}]", allowed)
    return ITEMS_A_PART * len(content)


def _part(part: Any, where: str, allowed: tuple[str, ...]) -> None:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise unfit(where, f"must be a part of type {', '.join(allowed)}")
    kind = part["type"]
    if kind not in allowed:
        raise _unserved(where, f"parts of type {_shown(kind)}", allowed)
    name = TEXTS.get(kind)
    if name is not None:
        _require_text(part, where, name)
        return
    if part.get("file_id") is not None:
        raise unfit(f"{where}.file_id", "names a file, and none are kept here; send its image_url")
    # With a uuid, it may be an image that the engine has.
    _require_text(part, where, "image_url", optional=part.get("uuid") is not None)
    _require_one_of(part, where, "detail", _DETAILS)


def item_id(response_id: str, kind: str, position: int) -> str:
    """Return the id of an item in a response's output; `response_of` is the inverse."""
    name = _PREFIXES.get(kind, "item")
    return f"{name}_{response_id.removeprefix(_RESPONSE)}_{position}"


def call_id(response_id: str, position: int) -> str:
    return f"call_{response_id.removeprefix(_RESPONSE)}_{position}"


def response_of(item_id: str) -> str | None:
    found = _ITEM_ID.fullmatch(item_id)
    return None if found is None else _RESPONSE + found[1]


def check_response_tools(body: Mapping[str, Any]) -> None:
    """Refuse a request of ``/v1/responses`` whose tools are wrong, or none is served.

    Tools of other kinds beside functions are left out: clients offer them to any server.
    """
    _check_tools(body.get("tools"))
    _check_tool_choice(body.get("tool_choice"))


def _check_tools(tools: Any) -> None:
    if tools is None:
        return
    if not isinstance(tools, list):
        raise unfit("tools", "must be a list of tools")
    for position, tool in enumerate(tools):
        where = f"tools[{position}]"
        kind = _kind(tool, where)
        if kind == FUNCTION:
            _check_function(tool, where)
        elif kind == NAMESPACE:
            for name in ("name", "description"):
                _require_text(tool, where, name)
            if not isinstance(tool.get("tools"), list):
                raise unfit(f"{where}.tools", "must be a list of tools")
            for number, inner in enumerate(tool["tools"]):
                if _kind(inner, f"{where}.tools[{number}]") == FUNCTION:
                    _check_function(inner, f"{where}.tools[{number}]")
    if tools and not any(map(is_served, tools)):
        kind = _shown(tools[0]["type"])
        raise _unserved("tools[0].type", f"tools of type {kind}", (FUNCTION, NAMESPACE))


def _check_function(tool: Mapping[str, Any], where: str) -> None:
    _require_text(tool, where, "name")
    _require_text(tool, where, "description", optional=True)
    if not isinstance(tool.get("parameters"), dict | None):
        raise unfit(f"{where}.parameters", "must be an object: the JSON schema of its arguments")
    if not isinstance(tool.get("strict"), bool | None):
        raise unfit(f"{where}.strict", "must be true or false")


def _check_tool_choice(choice: Any) -> None:
    if not isinstance(choice, dict):
        if not isinstance(choice, str | None) or choice not in _TOOL_CHOICES:
            raise unfit("tool_choice", "must be auto, none, required, or an object")
        return
    kind = _kind(choice, "tool_choice")
    if kind == "allowed_tools":
        _require_one_of(choice, "tool_choice", "mode", _ALLOWED_MODES)
        if not isinstance(choice.get("tools"), list):
            raise unfit("tool_choice.tools", "must be a list of tools")
        named = {f"tool_choice.tools[{at}]": tool for at, tool in enumerate(choice["tools"])}
        functions = {where: tool for where, tool in named.items() if _kind(tool, where) == FUNCTION}
        if not functions:
            raise unfit("tool_choice.tools", "must name a function; no other tools are served")
        for where, tool in functions.items():
            _require_text(tool, where, "name")
        return
    if kind != FUNCTION:
        raise _unserved("tool_choice.type", f"tools of type {_shown(kind)}", (FUNCTION,))
    _require_text(choice, "tool_choice", "name")


def is_served(tool: Mapping[str, Any]) -> bool:
    """Return whether a tool is shown to the model, or has such tools under its name."""
    if tool["type"] == NAMESPACE:
        return any(inner["type"] == FUNCTION for inner in tool["tools"])
    return bool(tool["type"] == FUNCTION)


def _kind(tool: Any, where: str) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise unfit(where, "must be an object with a type")
    return kind


def _require_text(item: Mapping[str, Any], where: str, name: str, optional: bool = False) -> None:
    value = item.get(name)
    if not isinstance(value, str) and not (optional and value is None):
        raise unfit(f"{where}.{name}", "must be a string")


def _require_one_of(
    item: Mapping[str, Any], where: str, name: str, allowed: tuple[str | None, ...]
) -> None:
    if item.get(name) not in allowed:
        words = ", ".join(word for word in allowed if word is not None)
        raise unfit(f"{where}.{name}", f"must be one of {words}")


def _shown(kind: Any) -> str:
    return repr(kind)[:100]


def _unserved(where: str, what: str, served: Iterable[str]) -> ApiError:
    return ApiError(
        400,
        f"{where}: {what} are not served here, only {', '.join(served)}; leave this one out",
        "unsupported_value",
        param=where,
    )
