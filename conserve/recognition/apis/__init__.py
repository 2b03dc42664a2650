"""Converts the messages of all APIs to those of chats, so that another API can continue a history.

A request is converted to what vLLM 0.32 makes of it before it renders the prompt. So requests that
differ here have different prompts, and the other way round. Adjacent texts stay apart, for
`conserve.recognition.normal` to join. Nothing here raises, whatever the JSON: requests are read
before they are validated.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from conserve.apis import MESSAGES, RESPONSES
from conserve.recognition.answers import answers_from_body, answers_from_stream
from conserve.recognition.apis import anthropic, responses
from conserve.recognition.normal import without_times

# Beside tools, these change the prompt, or its KV, from the first token on.
_FROM_THE_BEGINNING = ("chat_template", "cache_salt")


def heard(
    path: str, body: Mapping[str, Any], volatile: Collection[str] = ()
) -> tuple[list[Any], dict[str, Any]]:
    """Return a turn's messages, and what else begins its prompt (``before`` of `chain_of`)."""
    before = {name: body[name] for name in _FROM_THE_BEGINNING if body.get(name)}
    if tools := tools_of(path, body):
        before["tools"] = tools
    return messages_of(path, body, volatile), before


def messages_of(path: str, body: Mapping[str, Any], volatile: Collection[str] = ()) -> list[Any]:
    """Return the messages of a turn in the form of a chat's, the system's among them.

    Args:
        volatile: kinds of text that are left out of system messages; see
            `conserve.recognition.normal`.
    """
    if path == MESSAGES:
        messages = anthropic.messages_in(body)
    elif path == RESPONSES:
        messages = responses.messages_in(body)
    else:
        given = body.get("messages")
        messages = list(given) if isinstance(given, list | tuple) else [given]
    return without_times(messages) if "times" in volatile else messages


def continues(path: str, body: Mapping[str, Any]) -> bool:
    """Return whether a turn has its last message, the assistant's, continued (prefill).

    In the Messages API it always is. A chat says so (``continue_final_message``), and Responses by
    the status of the item.
    """
    given = body.get("input" if path == RESPONSES else "messages")
    last = given[-1] if isinstance(given, list | tuple) and given else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        return False
    if path == RESPONSES:
        return last.get("status") in ("in_progress", "incomplete")
    return path == MESSAGES or body.get("continue_final_message") is True


def tools_of(path: str, body: Mapping[str, Any]) -> list[Any]:
    """Return the tools of a turn in the form of a chat's: name, description and parameters.

    Other fields, and tools that are no functions, are left out: engines do not show them to the
    model.
    """
    given = body.get("tools")
    tools = given if isinstance(given, list | tuple) else []
    if path == MESSAGES:
        return [anthropic.tool(tool) for tool in tools]
    if path == RESPONSES:
        return [found for tool in tools for found in responses.functions(tool)]
    return [_chat_tool(tool) for tool in tools]


def answers_of(path: str, parts: Iterable[bytes], streamed: bool) -> list[dict[str, Any]]:
    """Return the whole answers in what a client was sent, as assistant messages of a chat.

    Args:
        parts: the body, or the stream's bytes, cut anywhere.
    """
    if path == MESSAGES:
        return anthropic.answers_in_stream(parts) if streamed else anthropic.answers_in_body(parts)
    if path == RESPONSES:
        return responses.answers_in_stream(parts) if streamed else responses.answers_in_body(parts)
    return answers_from_stream(parts) if streamed else answers_from_body(b"".join(parts))


def _chat_tool(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        return tool
    return responses.chat_function(function, function.get("name"))
