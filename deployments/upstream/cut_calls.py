"""Has an answer in one piece that was cut within a call say so, and have the call.

vLLM 0.32 makes of it text with the model's own marks, or leaves the call out, or calls half of it
whole, so that clients run it. Here the answer ends with ``length``, and has the calls that its
stream would have. The last one's arguments may be no JSON; in Messages, whose input is an object,
it has as much of them as there is.
"""

import functools
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

import pydantic_core

from deployments.upstream.patch import Patch, of

logger = logging.getLogger("ray.serve")

_CUT = "length"
# Returns the last output of the current request, if its answer is made in one piece.
_last: ContextVar[Callable[[], Any]] = ContextVar("conserve_last_output", default=lambda: None)


def apply() -> None:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages as Messages
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat as Chat
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses as Responses

    Chat._make_parser = _parses_as_streams(Chat._make_parser)
    Chat.chat_completion_full_generator = _whole_chat(Chat.chat_completion_full_generator)
    Messages.messages_full_converter = _whole_message(Messages.messages_full_converter)
    Responses._make_response_parser = _parses_as_streams(Responses._make_response_parser)
    Responses.responses_full_generator = _whole_response(Responses.responses_full_generator)


def _whole_chat(generate: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(generate)
    async def answered(handler: Any, request: Any, outputs: Any, *given: Any, **more: Any) -> Any:
        last: Any = None

        async def watched() -> AsyncIterator[Any]:
            nonlocal last
            async with aclosing(outputs):
                async for last in outputs:
                    yield last

        before = _last.set(lambda: last)
        try:
            answer = await generate(handler, request, watched(), *given, **more)
        finally:
            _last.reset(before)
        cut = () if last is None else [one.index for one in last.outputs if _is_cut(one)]
        # An error has none.
        for choice in getattr(answer, "choices", ()):
            if choice.index in cut:
                choice.finish_reason = _CUT
        return answer

    return answered


def _whole_response(generate: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(generate)
    async def answered(
        self: Any, request: Any, params: Any, outputs: Any, context: Any, *given: Any, **more: Any
    ) -> Any:
        before = _last.set(lambda: getattr(context, "final_output", None))
        try:
            return await generate(self, request, params, outputs, context, *given, **more)
        finally:
            _last.reset(before)

    return answered


def _is_cut(choice: Any) -> bool:
    return bool(choice.finish_reason == _CUT)


def _parses_as_streams(make: Callable[..., Any]) -> Callable[..., Any]:
    """Have parsers find in an answer that was cut what they find in a stream."""

    @functools.wraps(make)
    def made(handler: Any, request: Any, *given: Any) -> Any:
        parser = make(handler, request, *given)
        if parser is None:
            return None
        parse = parser.parse

        @functools.wraps(parse)
        def parsed(text: str, request_: Any, **options: Any) -> Any:
            found = parse(text, request_, **options)
            last = _last.get()()
            # Without tools vLLM sets `tool_choice` to "none".
            if last is None or request.tool_choice == "none":
                return found
            if not any(_is_cut(choice) and choice.text == text for choice in last.outputs):
                return found
            reasoning, _, calls = found
            # The parser keeps state of what it has parsed in one piece, so this takes a new one.
            another = make(handler, request, *given)
            ids = [*options.get("model_output_token_ids", ())]
            prompt_ids = last.prompt_token_ids or []
            try:
                delta = another.parse_delta(text, ids, request, prompt_ids, finished=True)
            except Exception:
                logger.exception("an answer that was cut cannot be parsed as a stream")
                return found
            begun = _calls_in(delta)
            # Some parsers see only one call in a text that comes all at once.
            if not begun or len(begun) < len(calls or ()):
                return found
            content = delta.content if (delta.content or "").strip() else None
            return reasoning, content, begun

        parser.parse = parsed
        return parser

    return made


def _calls_in(delta: Any) -> list[Any]:
    from vllm.entrypoints.generate.base.protocol import FunctionCall

    found: dict[int, Any] = {}
    for part in () if delta is None else delta.tool_calls:
        call = found.setdefault(part.index, FunctionCall(name="", arguments=""))
        call.id = part.id or call.id
        if part.function is not None:
            call.name += part.function.name or ""
            call.arguments += part.function.arguments or ""
    return [call for _, call in sorted(found.items()) if call.name]


def _whole_message(convert: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(convert)
    def answered(handler: Any, chat: Any) -> Any:
        for call in chat.choices[0].message.tool_calls:
            call.function.arguments = _whole_json(call.function.arguments)
        return convert(handler, chat)

    return answered


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


_CHAT = "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat"
_RESPONSES = "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses"

PATCH = Patch(
    name="cut_calls",
    seams=(
        *of(_CHAT, "_make_parser chat_completion_full_generator"),
        *of(_RESPONSES, "_make_response_parser responses_full_generator"),
        "vllm.entrypoints.openai.responses.context:SimpleContext.final_output",
        "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.messages_full_converter",
        *of("vllm.parser.abstract_parser:DelegatingParser", "parse parse_delta"),
    ),
    why="clients run half a call, or are shown the model's own marks of one",
    upstream="vllm-project/vllm#58228 and #47903",
    process="server",
)
