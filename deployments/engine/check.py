"""What an engine would say to a request, without its work: the errors, or the prompts' tokens.

``POST /conserve/check/v1/chat/completions`` (or another turn's path) is served by vLLM's own code
for the path behind the prefix, up to the call that would hand the request to the engine. So
parameters are judged, and the prompt is rendered, by the very rules of the turn itself. Templates
and tokenizers run in vLLM's threads, and nothing is scheduled.

Internals of vLLM 0.29 that are used: ``AsyncLLM.generate`` and ``input_processor``, the app's
``state.online_renderer``, ``create_error_response``.
"""

import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm import CompletionOutput, RequestOutput
from vllm.entrypoints.serve import create_error_response

from conserve.apis import COUNT_TOKENS, MESSAGES, RESPONSES
from conserve.wire import CHECK_PREFIX

# What vLLM makes answers of these from has a choice; of a chat's, it may have none.
_WITH_A_CHOICE = (MESSAGES, RESPONSES)


@dataclass(slots=True)
class _Check:
    path: str = ""
    prompts: list[list[int]] = field(default_factory=list)
    refusal: Any = None


_current: ContextVar[_Check | None] = ContextVar("conserve_check", default=None)
# Whether tokens are only counted: nothing comes to the engine's core then either.
_counting: ContextVar[bool] = ContextVar("conserve_counting", default=False)


def make_checkable(client: Any, renderer: Any, tasks: tuple[str, ...]) -> None:
    """Have an ``AsyncLLM`` judge, and not serve, the requests of a `RequestCheck`.

    Args:
        renderer: the ``OnlineRenderer`` of its HTTP app.
        tasks: what the engine can do (``get_supported_tasks``).
    """
    generate = client.generate

    @functools.wraps(generate)
    def checked(
        prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        check = _current.get()
        if check is None:
            answer: AsyncIterator[Any] = generate(prompt, sampling_params, request_id, **options)
            return answer
        known = ("lora_request", "priority", "data_parallel_rank")
        try:
            asked = client.input_processor.process_inputs(
                request_id,
                prompt,
                sampling_params,
                tasks,
                **{name: options[name] for name in known if name in options},
            )
        except Exception as error:
            # A stream would tell it in its first event, behind a 200.
            check.refusal = create_error_response(error)
            raise
        ids = list(asked.prompt_token_ids or ())
        check.prompts.append(ids)
        choices = []
        if not sampling_params.detokenize:
            # A beam search looks into the first, and ends if it is empty.
            choices = [CompletionOutput(0, "", [], None, None)]
        elif check.path in _WITH_A_CHOICE:
            choices = [CompletionOutput(0, "", [], None, None, finish_reason="stop")]
        return _answer(request_id, ids, choices)

    client.generate = checked
    for name in ("render_chat", "render_completion", "preprocess_chat"):
        setattr(renderer, name, _without_mm_cache(getattr(renderer, name)))


def _without_mm_cache(render: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    # That cache has a half in the engine's core, which takes what it was told of once for known.
    @functools.wraps(render)
    async def rendered(*given: Any, skip_mm_cache: bool = False, **more: Any) -> Any:
        skip = skip_mm_cache or _counting.get() or _current.get() is not None
        return await render(*given, skip_mm_cache=skip, **more)

    return rendered


async def _answer(
    request_id: str, ids: list[int], choices: list[CompletionOutput]
) -> AsyncIterator[RequestOutput]:
    """An answer of no choices, or of an empty one."""
    yield RequestOutput(request_id, None, ids, None, choices, finished=True)


class RequestCheck:
    """ASGI middleware in front of an engine's HTTP app, for paths under `CHECK_PREFIX`.

    It answers ``{"prompts": [[token ids], ...]}``, or as the engine would refuse the request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # One request may be begun within another one's task.
        _current.set(None)
        _counting.set(scope.get("path") == COUNT_TOKENS)
        if scope["type"] != "http" or not scope["path"].startswith(CHECK_PREFIX):
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(CHECK_PREFIX)
        check = _Check(path)
        status, parts = 0, []

        async def keep(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        _current.set(check)
        inner = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(inner, receive, keep)
        if check.refusal is not None:
            refusal = check.refusal
            answer: Response = JSONResponse(refusal.model_dump(), refusal.error.code)
        elif status == 200 and check.prompts:
            answer = Response(json.dumps({"prompts": check.prompts}), media_type="application/json")
        else:
            answer = Response(b"".join(parts), status, media_type="application/json")
        await answer(scope, receive, send)
