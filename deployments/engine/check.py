"""Has vLLM judge a turn's request, or compute its prompt's KV, without answering it.

``POST /conserve/check/v1/chat/completions`` (or another turn's path) runs vLLM's own code for that
path, up to the call that would schedule the request. So the turn's own rules judge its parameters
and render its prompt. ``POST /conserve/prefill/...`` has the engine compute the prompt, images
included, for one token, whatever answer the turn asks for. An engine that only encodes computes the
images alone, and no token.
"""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm import CompletionOutput, RequestOutput, SamplingParams
from vllm.entrypoints.serve import create_error_response
from vllm.sampling_params import RequestOutputKind

from conserve import wire
from conserve.apis import COUNT_TOKENS, MESSAGES, RESPONSES
from conserve.turn import TurnStats
from conserve.wire import CHECK_PREFIX, PREFILL_PREFIX
from deployments.engine.vision.node_images import MissingTokens
from deployments.messages import Checked
from deployments.upstream.message_fields import no_output
from deployments.upstream.prompt_lengths import counting, takes_room_left

_ROOM_LEFT, _NO_OUTPUT = (one[1:].encode() for one in (wire.ROOM_LEFT, wire.NO_OUTPUT))
# vLLM makes answers of these only from an output with a choice.
_WITH_A_CHOICE = (MESSAGES, RESPONSES)


@dataclass(slots=True)
class _Check:
    path: str = ""
    prefills: bool = False
    found: Checked = field(default_factory=lambda: Checked([], False, 0))
    prefilled: list[TurnStats] = field(default_factory=list)
    refusal: Any = None

    @property
    def answer(self) -> Checked | TurnStats | None:
        if self.prefills:
            return _all_of(self.prefilled) if self.prefilled else None
        return self.found if self.found.prompts else None


_current: ContextVar[_Check | None] = ContextVar("conserve_check", default=None)


def refuse_check(error: Exception) -> None:
    """Have the current check, if this is one, answer an error with its status."""
    if (check := _current.get()) is not None:
        # A stream would answer 200, and tell the error in its first event.
        check.refusal = create_error_response(error)


def make_checkable(
    client: Any,
    renderer: Any,
    tasks: tuple[str, ...],
    missing_tokens: MissingTokens,
    *,
    stores: bool = True,
) -> None:
    """Have an ``AsyncLLM`` judge or prefill requests of a `RequestCheck`, and not serve them.

    Args:
        stores: whether it has a KV connector, by which it stores what it prefills.
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
        choices = _choices(check.path, sampling_params)
        if check.prefills:
            stream = generate(prompt, _one_token(stores), request_id, **options)
            return _prefilled(check, stream, choices)
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
            refuse_check(error)
            raise
        ids = list(asked.prompt_token_ids or ())
        check.found.prompts.append(ids)
        images = [(one.identifier, one.mm_position) for one in asked.mm_features or ()]
        check.found.multimodal |= bool(images)
        check.found.encode_tokens += missing_tokens(images)
        return _answer(request_id, ids, choices)

    client.generate = checked
    for name in ("render_chat", "render_completion", "preprocess_chat"):
        setattr(renderer, name, _without_mm_cache(getattr(renderer, name)))


def _without_mm_cache(render: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    # Half of that cache is in the engine's core, which does not see requests that are only read.
    @functools.wraps(render)
    async def rendered(*given: Any, skip_mm_cache: bool = False, **more: Any) -> Any:
        check = _current.get()
        skip = skip_mm_cache or (counting.get() or (check is not None and not check.prefills))
        return await render(*given, skip_mm_cache=skip, **more)

    return rendered


def _choices(path: str, sampling_params: Any) -> list[CompletionOutput]:
    if not sampling_params.detokenize:
        # A beam search reads the first choice, and ends if that is empty.
        return [CompletionOutput(0, "", [], None, None)]
    if path in _WITH_A_CHOICE:
        return [CompletionOutput(0, "", [], None, None, finish_reason="stop")]
    return []


async def _answer(
    request_id: str, ids: list[int], choices: list[CompletionOutput]
) -> AsyncIterator[RequestOutput]:
    yield RequestOutput(request_id, None, ids, None, choices, finished=True)


def _one_token(stores: bool) -> SamplingParams:
    # A prefiller that hosts conversations stores only what it is told to, as a decoder does.
    told = {"kv_transfer_params": wire.transfer_params(park=True)} if stores else None
    return SamplingParams(
        max_tokens=1,
        temperature=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=told,
    )


async def _prefilled(
    check: _Check, stream: Any, choices: list[CompletionOutput]
) -> AsyncIterator[RequestOutput]:
    """Yield an empty answer once the prompt's KV is computed."""
    try:
        async with aclosing(stream):
            async for output in stream:
                ids = list(output.prompt_token_ids or ())
                found = wire.cached_tokens(output.kv_transfer_params)
                encoded = wire.encoded(output.ec_transfer_params)
                check.prefilled.append(
                    TurnStats(
                        prefilled_tokens=len(ids),
                        prefiller_lmcache_tokens=found.lmcache_tokens or 0,
                        prefiller_cached_tokens=output.num_cached_tokens,
                        encoded_images=encoded.images,
                        encoded_tokens=encoded.tokens,
                        node_images=encoded.node_images,
                    )
                )
                async for said in _answer(output.request_id, ids, choices):
                    yield said
    except Exception as error:
        refuse_check(error)
        raise


def _all_of(done: list[TurnStats]) -> TurnStats:
    whole = TurnStats(
        prefilled_tokens=sum(one.prefilled_tokens for one in done),
        prefiller_lmcache_tokens=sum(one.prefiller_lmcache_tokens for one in done),
        prefiller_cached_tokens=done[0].prefiller_cached_tokens if len(done) == 1 else None,
    )
    for one in done:
        whole.add_encoded(one)
    return whole


class RequestCheck:
    """ASGI middleware that serves `CHECK_PREFIX` and `PREFILL_PREFIX` before an engine's HTTP app.

    It answers with `Checked` or `TurnStats` as JSON. Where the engine would refuse the request, it
    answers so.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A request may be begun within another one's task.
        _current.set(None)
        counting.set(scope.get("path") == COUNT_TOKENS)
        takes_room_left.set(scope.get("query_string") == _ROOM_LEFT)
        no_output.set(scope.get("query_string") == _NO_OUTPUT)
        prefixes = (CHECK_PREFIX, PREFILL_PREFIX)
        if scope["type"] != "http" or not scope["path"].startswith(prefixes):
            await self._app(scope, receive, send)
            return
        prefills = scope["path"].startswith(PREFILL_PREFIX)
        path = scope["path"].removeprefix(PREFILL_PREFIX if prefills else CHECK_PREFIX)
        check = _Check(path, prefills)
        status, parts = 0, []

        async def keep(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        _current.set(check)
        try:
            await self._app({**scope, "path": path, "raw_path": path.encode()}, receive, keep)
        except Exception:
            # A stream of responses raises what it meets.
            if check.refusal is None:
                raise
        if (refusal := check.refusal) is not None:
            answer: Response = JSONResponse(refusal.model_dump(), refusal.error.code)
        elif status == 200 and check.answer is not None:
            answer = Response(msgspec.json.encode(check.answer), media_type="application/json")
        else:
            answer = Response(b"".join(parts), status, media_type="application/json")
        await answer(scope, receive, send)
