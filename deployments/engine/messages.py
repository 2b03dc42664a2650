"""vLLM's Messages API, made to answer as Anthropic's does where the two differ.

- A last message of the assistant's is continued (prefill); vLLM would close it and begin another.
  Where the model's template or tokenizer cannot, the request is refused in Anthropic's words.
- A stream's first event says of caches what its last one says.
- ``stop_sequence`` is there when it is null, an answer's id is ``msg_...`` and a call's is
  ``toolu_...``.
- ``stop_reason`` is ``tool_use`` exactly where an answer calls a tool. vLLM leaves that out for a
  call that was forced.
- A body with half a call (`deployments.engine.cut_calls`) has as much of its input as there is.

An event with output passes after one look at its name.

Internals of vLLM 0.29 that are used: ``AnthropicServingMessages`` (``to_chat_completion_request``,
``render_chat_request``, ``messages_full_converter``, ``message_stream_converter``,
``enable_prompt_tokens_details``, ``renderer``).
"""

import functools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pydantic_core
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse
from vllm.entrypoints.serve import create_error_response
from vllm.exceptions import VLLMValidationError

from conserve.apis import MESSAGE_ID
from deployments.engine.observer import ToldOfCaches

NO_PREFILL = (
    "This model does not support assistant message prefill. "
    "The conversation must end with a user message."
)
# vLLM's ids begin so; some models have ids of their own for calls.
_CHAT_ID = "chatcmpl-"
_CHAT_CALL_ID = "chatcmpl-tool-"
_CALL_ID = "toolu_"
_OUTPUT = "event: content_block_delta\n"
_BLOCK = "event: content_block_start\n"
_CALL = '"type":"tool_use"'
_START = "event: message_start\n"
_DELTA = "event: message_delta\n"
# How much of a prefill is looked for at the end of the prompt.
_LOOKED_AT_CHARS = 32
_LOOKED_AT_TOKENS = 64


def answer_as_anthropic(handler: Any, told: Callable[[], ToldOfCaches | None]) -> None:
    """Change what vLLM's ``AnthropicServingMessages`` makes of requests and answers.

    ``told`` returns what the current turn's client is told of caches.
    """
    convert = handler.to_chat_completion_request
    render = handler.render_chat_request
    whole = handler.messages_full_converter
    stream = handler.message_stream_converter

    @functools.wraps(convert)
    def converted(request: Any, **options: Any) -> Any:
        chat = convert(request, **options)
        if request.messages[-1].role == "assistant":
            chat.continue_final_message, chat.add_generation_prompt = True, False
        return chat

    @functools.wraps(render)
    async def rendered(request: Any) -> Any:
        if not request.continue_final_message:
            return await render(request)
        try:
            result = await render(request)
        except (ValueError, VLLMValidationError) as error:
            if "continue_final_message" not in str(error):
                raise
            return _no_prefill()
        if isinstance(result, tuple):
            text = _text_of(request.messages[-1].get("content"))
            if not all(_ends_with(text, one, handler.renderer) for one in result[1]):
                return _no_prefill()
        return result

    @functools.wraps(whole)
    def answered(chat: Any) -> AnthropicMessagesResponse:
        for call in chat.choices[0].message.tool_calls:
            call.function.arguments = _whole_json(call.function.arguments)
            call.id = call.id.replace(_CHAT_CALL_ID, _CALL_ID, 1)
        message = whole(chat)
        calls = any(block.type == "tool_use" for block in message.content)
        own = {
            "id": _own_id(message.id),
            "stop_reason": _stop_reason(message.stop_reason, calls),
        }
        fields = {name: getattr(message, name) for name in type(message).model_fields}
        return _Message.model_construct(**{**fields, **own})

    @functools.wraps(stream)
    async def streamed(chunks: Any) -> AsyncIterator[str]:
        calls = False
        async with aclosing(stream(chunks)) as events:
            async for event in events:
                if event.startswith(_OUTPUT):
                    pass
                elif event.startswith(_BLOCK) and _CALL in event:
                    calls = True
                    event = event.replace(f'"id":"{_CHAT_CALL_ID}', f'"id":"{_CALL_ID}', 1)
                elif event.startswith(_START):
                    says_caches = handler.enable_prompt_tokens_details
                    event = _started(event, told() if says_caches else None)
                elif event.startswith(_DELTA):
                    event = _ended(event, calls)
                yield event

    handler.to_chat_completion_request = converted
    handler.render_chat_request = rendered
    handler.messages_full_converter = answered
    handler.message_stream_converter = streamed


class _Message(AnthropicMessagesResponse):  # type: ignore[misc]  # To mypy it is Any.
    """An answer in one piece, with two members that clients read and vLLM leaves out when null."""

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return {
            **super().model_dump(**options),
            "stop_reason": self.stop_reason,
            "stop_sequence": self.stop_sequence,
        }


def _no_prefill() -> Any:
    return create_error_response(VLLMValidationError(NO_PREFILL, parameter="messages"))


def _text_of(content: Any) -> str:
    """Return the text to be continued, of several parts the last."""
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in content or () if part.get("type") == "text"]
    return texts[-1] if texts else ""


def _ends_with(text: str, prompt: Any, renderer: Any) -> bool:
    """Return whether a prompt ends with a text, without white space, since templates trim."""
    rendered = prompt.get("prompt")
    if not isinstance(rendered, str):
        rendered = renderer.tokenizer.decode(prompt["prompt_token_ids"][-_LOOKED_AT_TOKENS:])
    looked_at = "".join(text.split())[-_LOOKED_AT_CHARS:]
    return "".join(rendered[-len(text) - _LOOKED_AT_CHARS :].split()).endswith(looked_at)


def _whole_json(arguments: str) -> str:
    """Return a call's arguments, or as much JSON as there is where they were cut off."""
    try:
        pydantic_core.from_json(arguments)
    except ValueError:
        try:
            found = pydantic_core.from_json(arguments, allow_partial=True)
        except ValueError:
            found = None
        return json.dumps(found if isinstance(found, dict) else {})
    return arguments


def _own_id(id_: str) -> str:
    return MESSAGE_ID + id_.removeprefix(_CHAT_ID)


def _stop_reason(theirs: str | None, calls: bool) -> str | None:
    if theirs in ("end_turn", "tool_use"):
        return "tool_use" if calls else "end_turn"
    return theirs


def _started(event: str, told: ToldOfCaches | None) -> str:
    data = _data(event)
    message = data["message"]
    message["id"] = _own_id(message["id"])
    if told is not None:
        usage = message["usage"]
        given = {
            "cache_read_input_tokens": told.read_tokens,
            "cache_creation_input_tokens": told.created_tokens,
        }
        # vLLM counts the whole prompt as input here, and in the last event only what was computed.
        known = {name: tokens for name, tokens in given.items() if tokens is not None}
        usage["input_tokens"] = max(0, usage["input_tokens"] - sum(known.values()))
        usage |= known
    return _event(_START, data)


def _ended(event: str, calls: bool) -> str:
    data = _data(event)
    delta = data["delta"]
    delta["stop_reason"] = _stop_reason(delta.get("stop_reason"), calls)
    delta.setdefault("stop_sequence", None)
    return _event(_DELTA, data)


def _data(event: str) -> Any:
    return json.loads(event.partition("data: ")[2])


def _event(name: str, data: Any) -> str:
    # As pydantic writes it: routers look for `"id":"` in passing.
    return f"{name}data: {json.dumps(data, separators=(',', ':'))}\n\n"
