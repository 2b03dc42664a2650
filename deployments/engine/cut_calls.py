"""Has an answer say that it was cut by its length while it called a tool, as OpenAI's do.

vLLM 0.29 says of such a stream that it ended with its calls, so clients run half a call. In one
piece, the same answer is text with the model's own marks, or lacks the call or its arguments
(https://github.com/vllm-project/vllm/issues/47903 and /58228). Here it ends with ``length``, and
has the calls that its stream would have; the last one's arguments may be no JSON.

Internals of vLLM 0.29 that are used: ``OpenAIServingChat.chat_completion_stream_generator`` and
``chat_completion_full_generator``, ``OpenAIServingResponses.responses_full_generator``,
``_effective_chat_template_kwargs``, ``renderer`` and ``model_config`` of both, ``SimpleContext``,
``Parser``.
"""

import functools
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

logger = logging.getLogger("ray.serve")

_CUT = "length"
_CALLED = '"finish_reason":"tool_calls"'


def tell_of_cut_calls(chats: Any, messages: Any, responses: Any) -> None:
    """Change what vLLM's chat, Messages and Responses handlers say of calls that were cut."""
    for handler in (chats, messages):
        handler.chat_completion_full_generator = _whole_chat(handler)
        handler.chat_completion_stream_generator = _streamed_chat(handler)
    responses.responses_full_generator = _whole_response(responses)


class _Outputs:
    """Watches outputs on their way to an API, and keeps choices that were cut, by index."""

    def __init__(self) -> None:
        self.cut: dict[int, Any] = {}
        self._prompt_ids: list[int] = []

    async def watch(self, outputs: Any) -> AsyncIterator[Any]:
        async with aclosing(outputs):
            async for output in outputs:
                self._prompt_ids = output.prompt_token_ids or self._prompt_ids
                for choice in output.outputs:
                    if choice.finish_reason == _CUT:
                        self.cut[choice.index] = choice
                yield output

    def prompt_of(self, text: str) -> list[int] | None:
        cut = any(choice.text == text for choice in self.cut.values())
        return self._prompt_ids if cut else None


def _whole_chat(handler: Any) -> Callable[..., Any]:
    generator = handler.chat_completion_full_generator

    @functools.wraps(generator)
    async def answered(request: Any, outputs: Any, *given: Any, **more: Any) -> Any:
        if not _may_call(request):
            return await generator(request, outputs, *given, **more)
        seen = _Outputs()
        if (parser := more.get("parser")) is not None:
            _parse_as_streams(parser, handler, request, seen.prompt_of)
        answer = await generator(request, seen.watch(outputs), *given, **more)
        # An error has none.
        for choice in getattr(answer, "choices", ()):
            if choice.index in seen.cut:
                choice.finish_reason = _CUT
        return answer

    return answered


def _streamed_chat(handler: Any) -> Callable[..., Any]:
    generator = handler.chat_completion_stream_generator

    async def told(request: Any, outputs: Any, *given: Any, **more: Any) -> AsyncIterator[str]:
        seen = _Outputs()
        async with aclosing(generator(request, seen.watch(outputs), *given, **more)) as events:
            async for event in events:
                # Within a text the quotes would be escaped. Each choice has its own last event.
                yield _cut_short(event, seen) if seen.cut and _CALLED in event else event

    @functools.wraps(generator)
    def streamed(request: Any, outputs: Any, *given: Any, **more: Any) -> AsyncIterator[str]:
        told_or_not = told if _may_call(request) else generator
        stream: AsyncIterator[str] = told_or_not(request, outputs, *given, **more)
        return stream

    return streamed


def _cut_short(event: str, seen: _Outputs) -> str:
    (choice,) = json.loads(event.removeprefix("data: "))["choices"]
    if choice["index"] not in seen.cut:
        return event
    return event.replace(_CALLED, f'"finish_reason":"{_CUT}"')


def _whole_response(handler: Any) -> Callable[..., Any]:
    from vllm.entrypoints.openai.responses.context import SimpleContext

    generator = handler.responses_full_generator

    @functools.wraps(generator)
    async def answered(
        request: Any, params: Any, outputs: Any, context: Any, *given: Any, **more: Any
    ) -> Any:
        simple = isinstance(context, SimpleContext) and context.response_parser is not None
        if simple and _may_call(request):

            def prompt_of(_: str) -> list[int] | None:
                last = context.last_output
                cut = last.outputs[0].finish_reason == _CUT
                return last.prompt_token_ids or [] if cut else None

            _parse_as_streams(context.response_parser, handler, request, prompt_of)
        return await generator(request, params, outputs, context, *given, **more)

    return answered


def _may_call(request: Any) -> bool:
    # Without tools vLLM sets this to "none".
    return bool(request.tool_choice != "none")


def _parse_as_streams(
    parser: Any, handler: Any, request: Any, prompt_of: Callable[[str], list[int] | None]
) -> None:
    """Have one request's parser find in an answer that was cut what it finds in a stream.

    ``prompt_of`` returns the prompt's token ids if the answer was cut.
    """
    parse = parser.parse

    @functools.wraps(parse)
    def parsed(text: str, request_: Any, **options: Any) -> Any:
        found = parse(text, request_, **options)
        prompt_ids = prompt_of(text)
        if prompt_ids is None:
            return found
        reasoning, _, calls = found
        # The parser keeps state of what it has parsed in one piece, so this takes a new one.
        another = type(parser)(
            handler.renderer.get_tokenizer(),
            request.tools,
            chat_template_kwargs=handler._effective_chat_template_kwargs(request),
            model_config=handler.model_config,
        )
        ids = [*options.get("model_output_token_ids", ())]
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
