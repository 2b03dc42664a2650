"""Converts requests of ``/v1/responses`` to the one form of each item that vLLM 0.32 takes.

OpenAI's schema allows fields to be absent or null which vLLM requires: ``type``, ``id`` and
``status`` of an assistant's message (vllm-project/vllm#54224), ``detail`` of an image in a tool's
result, ``summary`` of reasoning. vLLM also takes only the first text of an assistant's message and
of reasoning, and fails on a message without parts and on refusals. The changed request means the
same to the model.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from conserve.items import FUNCTION, NAMESPACE, TEXTS, is_served

Json = dict[str, Any]

# Only OpenAI's servers use these: which program may call a tool, and where a cache should end.
_NOT_FOR_ENGINES = ("caller", "prompt_cache_breakpoint")
# vLLM does not know these values of OpenAI's: there are no tiers here, and no searches whose
# results could be included.
_TIERS = ("fast", "ultrafast")
_INCLUDED = ("web_search_call.results", "web_search_call.action.sources")
# vLLM continues any last item that is not whole, but only an answer can be continued.
_PARTIAL = ("in_progress", "incomplete")


def canonical(body: Json) -> Json:
    """Return a request that `conserve.items` has accepted as vLLM takes it."""
    own = {name: value for name, value in body.items() if value is not None}
    given = own["input"]
    if isinstance(given, list):
        own["input"] = [_item(item) for item in given]
    if "tools" in own:
        own["tools"] = [_without_unserved(tool) for tool in own["tools"] if is_served(tool)]
    choice = own.get("tool_choice")
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        own["tool_choice"] = choice["mode"]
        own["tools"] = _allowed(own.get("tools", []), choice["tools"])
    if own.get("service_tier") in _TIERS:
        del own["service_tier"]
    if isinstance(own.get("include"), list):
        own["include"] = [name for name in own["include"] if name not in _INCLUDED]
    return body if own == body else own


def unserved_tools(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kinds of tools that are left out of a request, each once."""
    kinds = [
        inner["type"]
        for tool in body.get("tools") or ()
        for inner in (tool["tools"] if tool["type"] == NAMESPACE else (tool,))
    ]
    return tuple(dict.fromkeys(kind for kind in kinds if kind != FUNCTION))


def _item(item: Json) -> Json:
    own = _stripped(item)
    kind = own.get("type", "message")
    if kind == "message" and own["role"] == "assistant":
        _make_assistants(own)
    elif kind == "message":
        _without_partial(own)
        _make_parts(own, "content")
    elif kind == "reasoning":
        _make_reasoning(own)
    elif kind == "function_call_output":
        _make_parts(own, "output")
    return own


def _stripped(given: Json) -> Json:
    return {
        name: value
        for name, value in given.items()
        if value is not None and name not in _NOT_FOR_ENGINES
    }


def _make_assistants(own: Json) -> None:
    content = own["content"]
    if isinstance(content, str):
        # With a type, an id and a status, vLLM treats a text as a list of letters.
        if "id" in own or "status" in own:
            own |= {"type": "message", "content": [_output_text(content)]}
        return
    own["type"] = "message"
    parts = [_stripped(part) for part in content]
    # Annotations are made by OpenAI's own tools, and log-probabilities are of no use to a model.
    plain = len(parts) == 1 and all(
        name in ("type", "text") or value == [] for name, value in parts[0].items()
    )
    if not plain or parts[0]["type"] != "output_text":
        parts = [_output_text(_joined(parts))]
    own["content"] = parts


def _without_partial(own: Json) -> None:
    if own.get("status") in _PARTIAL:
        del own["status"]


def _make_parts(own: Json, name: str) -> None:
    if isinstance(own[name], list):
        own[name] = [_part(part) for part in own[name]]


def _part(part: Json) -> Json:
    own = _stripped(part)
    if own["type"] == "input_image":
        own.setdefault("detail", "auto")
    return own


def _make_reasoning(own: Json) -> None:
    _without_partial(own)
    own.pop("encrypted_content", None)
    parts = own.pop("content", None) or own.get("summary") or []
    own["summary"] = []
    if parts:
        own["content"] = [{"type": "reasoning_text", "text": _joined(parts)}]


def _output_text(text: str) -> Json:
    return {"type": "output_text", "text": text}


def _joined(parts: Iterable[Json]) -> str:
    """Return the text of parts, joined as vLLM joins those of a chat's message."""
    return "\n".join(part[TEXTS[part["type"]]] for part in parts)


def _without_unserved(tool: Json) -> Json:
    if tool["type"] != NAMESPACE:
        return tool
    return {**tool, "tools": [inner for inner in tool["tools"] if inner["type"] == FUNCTION]}


def _allowed(tools: list[Json], allowed: Iterable[Json]) -> list[Json]:
    names = {one["name"] for one in allowed if one["type"] == FUNCTION}
    found = []
    for tool in tools:
        if tool["type"] == NAMESPACE:
            inner = [
                one
                for one in tool["tools"]
                if one["name"] in names or f"{tool['name']}__{one['name']}" in names
            ]
            found += [{**tool, "tools": inner}] if inner else []
        elif tool["name"] in names:
            found.append(tool)
    return found
