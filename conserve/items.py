"""What stands in the requests of Messages and Responses: of which form, and how much of it.

vLLM 0.29 judges an item of ``/v1/responses`` against some thirty types: 0.1 ms each on two slow
cores, and 2 ms where none fits. So an item that it would refuse is refused here, in words that say
which; and a request may have fewer of them than a chat has messages.
"""

from collections.abc import Mapping
from typing import Any

from conserve.errors import ApiError
from conserve.served import require_continuable, require_served_block

ITEMS_A_PART = 3
# What an item costs vLLM, in messages of a chat (3 us).
_ITEM_COSTS = {"message": 30, "function_call_output": 30, "function_call": 6, "reasoning": 6}
# Together some 100 ms; 700 turns fit, each of a call, its result and its reasoning.
MOST_RESPONSE_ITEMS = 32_768

_ROLES = ("user", "assistant", "system", "developer")
_STATUSES = (None, "in_progress", "completed", "incomplete")
_INPUT_PARTS = ("input_text", "input_image", "input_file")
_OUTPUT_PARTS = ("output_text", "refusal", *_INPUT_PARTS)
_REASONING_PARTS = ("reasoning_text", "summary_text")
# Which member of a part has to be a text.
_TEXTS = {
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "reasoning_text": "text",
    "summary_text": "text",
}


def message_items(body: Mapping[str, Any]) -> int:
    """How many messages a request of ``/v1/messages`` has, parts counted as `ITEMS_A_PART` each.

    Args:
        body: parsed from JSON; its messages are known to be a list of objects.

    Raises:
        ApiError: 400, a block is not of the form that one has, or none that is served.
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
        # Text may stand anywhere, and is most of what there is.
        if block.get("type") != "text":
            require_served_block(block, f"{where}[{position}]", role)
        inner = block.get("content")
        if isinstance(inner, list):
            count += len(inner)
    return count


def response_items(body: Mapping[str, Any]) -> int:
    """What a request of ``/v1/responses`` costs to read, in messages of a chat.

    Raises:
        ApiError: 400, an item is none that can be served.
    """
    given = body.get("input")
    if isinstance(given, str):
        return 1
    if not isinstance(given, list) or not given:
        raise ApiError(
            400, "input must be a string or a list with at least one item", param="input"
        )
    return sum(_item(item, f"input[{position}]") for position, item in enumerate(given))


def _item(item: Any, where: str) -> int:
    if not isinstance(item, dict):
        raise _unfit(where, "must be an object")
    kind = item.get("type", "message")
    cost = _ITEM_COSTS.get(kind) if isinstance(kind, str) else None
    if cost is None:
        known = ", ".join(_ITEM_COSTS)
        raise _unfit(f"{where}.type", f"must be one of {known}; others are not served here")
    _require_text(item, where, "id", optional=True)
    if item.get("status") not in _STATUSES:
        raise _unfit(f"{where}.status", "must be in_progress, completed or incomplete")
    if kind == "message":
        if item.get("role") not in _ROLES:
            raise _unfit(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
        allowed = _OUTPUT_PARTS if item["role"] == "assistant" else _INPUT_PARTS
        return cost + _parts(item.get("content"), f"{where}.content", allowed)
    if kind == "reasoning":
        parts = 0
        for name in ("summary", "content"):
            if item.get(name) is not None:
                parts += _parts(item[name], f"{where}.{name}", _REASONING_PARTS, text=False)
        return cost + parts
    _require_text(item, where, "call_id")
    if kind == "function_call_output":
        return cost + _parts(item.get("output"), f"{where}.output", _INPUT_PARTS)
    _require_text(item, where, "name")
    _require_text(item, where, "arguments")
    _require_text(item, where, "namespace", optional=True)
    return cost


def _parts(content: Any, where: str, allowed: tuple[str, ...], *, text: bool = True) -> int:
    if text and isinstance(content, str):
        return 0
    if not isinstance(content, list):
        raise _unfit(where, f"must be {'a string or ' * text}a list of parts")
    for position, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in allowed:
            raise _unfit(f"{where}[{position}]", f"must be a part of type {', '.join(allowed)}")
        name = _TEXTS.get(kind)
        if name is not None:
            _require_text(part, f"{where}[{position}]", name)
    return ITEMS_A_PART * len(content)


def _require_text(item: Mapping[str, Any], where: str, name: str, optional: bool = False) -> None:
    value = item.get(name)
    if not isinstance(value, str) and not (optional and value is None):
        raise _unfit(f"{where}.{name}", "must be a string")


def _unfit(where: str, what: str) -> ApiError:
    return ApiError(400, f"{where} {what}", param=where)
