"""Checks for what APIs' schemas and other clients allow, and vLLM 0.32 ignores or misunderstands.

A request for what is not served is refused, with the field's name. What vLLM would serve in another
form is converted. Fields that only advise (user, cache times, service tier) have no effect.
"""

import json
from collections.abc import Mapping
from typing import Any

from conserve.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES, is_anthropic
from conserve.errors import ApiError, unfit
from conserve.fields import UNSERVED

Json = dict[str, Any]

# Values of fields that are not served (`conserve.fields`) by which they ask for nothing.
_ASK_NOTHING: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("auto", "none"),
    "container": ({}, {"id": None}, {"skills": None}, {"id": None, "skills": None}),
    "mcp_servers": ([],),
    "best_of": (1,),
}
_CHOOSE_NOTHING = (None, "auto", "none")
# Leaves the likeliest token alone.
_LIKELIEST_TOP_P = 1e-6
# Roles of earlier chats and of Gemini, and what to send. A model may have others of its own.
_ROLES = {"function": "tool, with its tool_call_id", "model": "assistant"}
_THINKING = ("thinking", "redacted_thinking")
# Parts of a chat's that LangChain, OpenRouter and LiteLLM keep, and where their texts are.
_TEXTS, _THOUGHTS = ("input_text", "output_text"), (*_THINKING, "reasoning")
_THOUGHT = ("thinking", "reasoning", "text", "summary")
# By Anthropic's schema any block may stand in any message; vLLM silently drops all but these.
_BLOCKS = {
    "user": ("text", "image", "tool_result", "tool_reference"),
    "assistant": ("text", "image", *_THINKING, "tool_use", "tool_result", "tool_reference"),
    "system": ("text",),
}
_RESULT_BLOCKS = ("text", "image", "tool_reference")
_IMAGE_SOURCES = ("base64", "url")


def as_served(body: Json, path: str) -> Json:
    """Return a request in vLLM's terms; the same object if nothing changes.

    The body has passed `conserve.budget`. Raises ApiError (400) for what is not served.
    """
    _require_served(body, path)
    body = _with_values(body, path)
    if path == CHAT:
        return _with_messages_served(_with_schema(body))
    return _without_budget(_without_empty_end(body)) if is_anthropic(path) else body


def _with_values(body: Json, path: str) -> Json:
    """Write values that schemas allow as vLLM takes them; leave out those that ask nothing."""
    own = {name: value for name, value in body.items() if path != COMPLETIONS or value is not None}
    if own.get("top_p") == 0:
        own |= {"top_p": 1, "temperature": 0}
    if own.get("temperature") == 0 and (own.get("n") or 1) > 1 and not own.get("use_beam_search"):
        # vLLM takes no temperature of 0 for several choices.
        own |= {"top_p": _LIKELIEST_TOP_P, "temperature": 1}
    if path != RESPONSES and not own.get("stream"):
        own.pop("stream_options", None)
    if path != RESPONSES and own.get("tools") in (None, []):
        own.pop("tools", None)
        choice = own.get("tool_choice")
        if (choice.get("type") if isinstance(choice, dict) else choice) in _CHOOSE_NOTHING:
            own.pop("tool_choice", None)
        elif is_anthropic(path):
            raise ApiError(400, "tool_choice: send tools to choose of", param="tool_choice")
    heat = own.get("temperature")
    if is_anthropic(path) and isinstance(heat, int | float) and heat > 1:
        raise ApiError(400, f"temperature: {heat} is not from 0 to 1", param="temperature")
    if is_anthropic(path) and own.get("max_tokens") == 0:
        if own.get("stream"):
            raise ApiError(400, "max_tokens: send 0 without stream", param="max_tokens")
        # Engines leave it out of the answer (`conserve.wire.NO_OUTPUT`).
        own["max_tokens"] = 1
    return body if own == body else own


def _require_served(body: Mapping[str, Any], path: str) -> None:
    messages = is_anthropic(path)
    for name, instead in UNSERVED[MESSAGES if messages else path].items():
        asked = body.get(name)
        empty = asked is None or (path == RESPONSES and not asked)
        if not empty and asked not in _ASK_NOTHING.get(name, ()):
            raise _unserved(name, "it", instead)
    if not messages and path != CHAT:
        return
    modalities = body.get("modalities")
    if isinstance(modalities, list) and any(one != "text" for one in modalities):
        raise _unserved("modalities", "any but text", "leave it out")
    plain, instead = (
        ("custom", "describe it by its name and input_schema, and run it in the client")
        if messages
        else ("function", "describe it as a function")
    )
    tools = body.get("tools")
    for position, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in (None, plain):
            raise _unserved(f"tools[{position}].type", f"a tool of type {_shown(kind)}", instead)


def require_served_block(block: Mapping[str, Any], where: str, role: str) -> None:
    """Refuse a block of Messages that the model would not be shown, with ApiError (400)."""
    kind = block.get("type")
    allowed = _BLOCKS.get(role)
    if allowed is None or kind is None:
        return  # vLLM refuses it.
    _require_one_of(allowed, block, where, f"in a message of the {role}'s")
    inner = block.get("content") if kind == "tool_result" else None
    for position, one in enumerate(inner if isinstance(inner, list) else ()):
        _require_one_of(_RESULT_BLOCKS, one, f"{where}.content[{position}]", "in a tool's result")


def _require_one_of(allowed: tuple[str, ...], block: Any, where: str, within: str) -> None:
    """Refuse a block of another kind, and an image that is sent in a way that is not served."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in allowed:
        raise ApiError(
            400,
            f"{where}.type: {_shown(kind)} is not served {within}; send {', '.join(allowed)}",
            "unsupported_value",
            param=f"{where}.type",
        )
    source = block.get("source") if kind == "image" else None
    by = source.get("type") if isinstance(source, dict) else None
    if by not in (None, *_IMAGE_SOURCES):
        field = f"{where}.source.type"
        raise _unserved(field, f"an image by {_shown(by)}", "send it as base64, or by its url")


def require_continuable(body: Mapping[str, Any]) -> None:
    """Refuse to continue a complete last message of the assistant's."""
    position, last = len(body["messages"]) - 1, body["messages"][-1]
    if last.get("role") != "assistant":
        return
    config = body.get("output_config")
    if isinstance(config, dict) and config.get("format") and not _says_nothing(last.get("content")):
        raise ApiError(
            400,
            "output_config.format: an answer of a given format cannot continue a message; let the "
            "conversation end with a user message",
            param="output_config.format",
        )
    content = last["content"] if isinstance(last.get("content"), list) else []
    calls = [block.get("id") for block in content if block.get("type") == "tool_use"]
    if calls:
        raise ApiError(
            400,
            f"messages.{position}: `tool_use` ids were found without `tool_result` blocks "
            f"immediately after: {', '.join(map(str, calls))}. Each `tool_use` block must have a "
            "corresponding `tool_result` block in the next message.",
            param="messages",
        )
    if content and content[-1].get("type") in _THINKING:
        raise ApiError(
            400,
            f"messages.{position}: The final block in an assistant message cannot be "
            f"`{content[-1]['type']}`.",
            param="messages",
        )


def _with_schema(body: Json) -> Json:
    """Ask for any JSON object if the chat's response format has no schema."""
    wanted = body.get("response_format")
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        return body
    named = wanted.get("json_schema")
    if not isinstance(named, dict) or named.get("schema") is not None:
        return body
    return {**body, "response_format": {"type": "json_object"}}


def _with_messages_served(body: Json) -> Json:
    """Check a chat's messages, and write those that other clients keep as vLLM takes them."""
    messages, unanswered = [], list[Any]()
    for position, message in enumerate(body["messages"]):
        _require_served_message(message, f"messages[{position}]")
        messages.append(_plain_message(message, position, unanswered))
    return {**body, "messages": messages} if messages != body["messages"] else body


def _plain_message(message: Json, position: int, unanswered: list[Any]) -> Json:
    """Return a message in OpenAI's form; results take the ids of the calls that they answer."""
    own, thoughts = dict(message), []
    if isinstance(own.get("content"), list):
        thoughts = [part for part in own["content"] if _kind(part) in _THOUGHTS]
        own["content"] = [
            {"type": "text", "text": part.get("text")} if _kind(part) in _TEXTS else part
            for part in own["content"]
            if own["role"] != "assistant" or _kind(part) not in _THOUGHTS
        ]
    if own.get("refusal") and not own.get("content"):
        own["content"] = own["refusal"]
    if own["role"] == "tool" and unanswered:
        if own.get("tool_call_id") is None:
            own["tool_call_id"] = unanswered[0]
        if own["tool_call_id"] in unanswered:
            unanswered.remove(own["tool_call_id"])
    elif own["role"] == "assistant":
        if not (own.get("reasoning") or own.get("reasoning_content")):
            kept = thoughts or own.get("reasoning_details") or own.get("thinking_blocks")
            if said := "".join(map(_thought, kept if isinstance(kept, list) else ())):
                own["reasoning"] = said
        if given := own.get("tool_calls"):
            named = [(call, f"call_{position}_{number}") for number, call in enumerate(given)]
            calls = own["tool_calls"] = [_plain_call(*one) for one in named]
            unanswered[:] = [call.get("id") for call in calls if isinstance(call, dict)]
    return own


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else None


def _thought(part: Any) -> str:
    texts = (part.get(name) for name in _THOUGHT) if isinstance(part, dict) else ()
    return next((text for text in texts if isinstance(text, str)), "")


def _plain_call(call: Any, id_: str) -> Any:
    """Return a call with what Ollama's clients leave out, and its arguments as text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    if isinstance(function.get("arguments"), dict | None):
        function = {**function, "arguments": json.dumps(function.get("arguments") or {})}
    given = {name: value for name, value in call.items() if value is not None}
    return {"id": id_, "type": "function", **given, "function": function}


def _require_served_message(message: Mapping[str, Any], where: str) -> None:
    """Refuse a chat's message that vLLM would not show to the model as it is meant."""
    role = message["role"]
    if role in _ROLES:
        raise _unserved(f"{where}.role", f"role {role}", f"send role {_ROLES[role]}")
    if role != "assistant":
        return
    if message.get("function_call") is not None:
        raise _unserved(f"{where}.function_call", "it", "send tool_calls")
    if message.get("audio") is not None:
        raise _unserved(f"{where}.audio", "it", "send what it said as content")
    calls = message.get("tool_calls")
    for position, call in enumerate(calls if isinstance(calls, list) else ()):
        kind = call.get("type") if isinstance(call, dict) else None
        if kind not in (None, "function"):
            field = f"{where}.tool_calls[{position}].type"
            raise _unserved(field, f"a call of type {_shown(kind)}", "send calls of functions")


def _without_empty_end(body: Json) -> Json:
    """Drop a last message of the assistant's that is empty.

    Continuing it would mean to begin an answer, for which the model's template has its own way.
    """
    *others, last = body["messages"]
    if not others or last.get("role") != "assistant" or not _says_nothing(last.get("content")):
        return body
    return {**body, "messages": others}


def _without_budget(body: Json) -> Json:
    """Let a model think without a bound but that of its output.

    vLLM refuses a budget for a model without a reasoning parser, and a stream with one could not
    move to another engine.
    """
    thinking = body.get("thinking")
    if not isinstance(thinking, dict) or thinking.get("type") != "enabled":
        return body
    if not isinstance(thinking.get("budget_tokens"), int):
        return body  # vLLM refuses it.
    return {**body, "thinking": {**thinking, "type": "adaptive"}}


def _says_nothing(content: Any) -> bool:
    if isinstance(content, str):
        return not content.strip()
    return isinstance(content, list) and all(
        block.get("type") == "text" and not str(block.get("text") or "").strip()
        for block in content
    )


def _shown(value: Any) -> str:
    return str(value)[:64]


def _unserved(field: str, what: str, instead: str) -> ApiError:
    return ApiError(
        400, f"{field}: {what} is not served here; {instead}", "unsupported_value", param=field
    )


_FIELD = "tool_choice"
_ALLOWED = f"{_FIELD}.allowed_tools"
_MODES = ("auto", "required")


def resolved(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return a request whose ``tool_choice`` engines know, with the tools that it may call.

    Only chats change. ApiError (400) if it chooses tools that are not served, or not among its
    tools.
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
        raise unfit(_ALLOWED, "must be an object with a mode and tools")
    mode, listed, tools = choice.get("mode"), choice.get("tools"), body.get("tools")
    if mode not in _MODES:
        raise unfit(f"{_ALLOWED}.mode", f"must be {' or '.join(_MODES)}")
    where = f"{_ALLOWED}.tools"
    if not isinstance(listed, list) or not listed:
        raise unfit(where, f'must be a list with at least one tool; for none send {_FIELD}: "none"')
    if not isinstance(tools, list):
        raise ApiError(400, f"{_ALLOWED} allows some of tools; send these too", param="tools")
    names = {_required_name(one, f"{where}[{position}]") for position, one in enumerate(listed)}
    kept = [tool for tool in tools if _name_of(tool) in names]
    missing = names - {_name_of(tool) for tool in kept}
    if missing:
        raise unfit(where, f"names {min(missing)[:100]!r}, which is not one of tools")
    return {**body, "tools": kept, _FIELD: mode}


def _required_name(tool: Any, where: str) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise unfit(f"{where}.type", f"is {kind[:40]!r}, and only functions are served")
    name = _name_of(tool)
    if name is None:
        raise unfit(where, 'must be {"type": "function", "function": {"name": ...}}')
    return name


def _name_of(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
