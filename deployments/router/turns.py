"""One turn, from the client's request to its last byte.

Who is speaking, where the conversation is bound, on its first turn the remote prefill, then the
decoder's answer, passed on as it comes.
"""

import asyncio
import json
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from conserve import identity, recognition, wire
from conserve.errors import ApiError, context_length_exceeded
from conserve.recognition import Digest
from conserve.settings import Settings
from deployments.messages import Prefilled, Refusal, TurnPlan, TurnTiming, Unplaced
from deployments.router.responses import TABLE_RESTARTING, error_response
from deployments.router.upstream import EngineUnreachable, Upstream, engine_error
from deployments.table.table_client import TableClient, TableUnavailable

logger = logging.getLogger("ray.serve")

_CHAT = "/v1/chat/completions"
# In an answer, or in a part of its stream; within a text its quotes would be escaped.
_TOOL_CALL = b'"tool_calls":[{'
# A turn whose engine dies before the client got a byte starts again elsewhere, so often.
_ATTEMPTS = 3
_BODY_TIMEOUT_S = 120.0
# A decoder reports a cancelled turn itself; this is for the case that it never saw it.
_CANCEL_GRACE_S = 10.0

# What the tokenizer endpoint has to know of a chat request to render the prompt as the engine will.
_RENDERED = (
    "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "add_special_tokens", "mm_processor_kwargs",
)  # fmt: skip
# The handoff is ours to direct.
_NOT_FORWARDED = ("kv_transfer_params",)


@dataclass(slots=True)
class Turn:
    """A turn under way.

    Attributes:
        explicit_id: the conversation, if the request names it.
        candidates: digests by which it is recognised if not.
        effective: its answer is complete, of a chat, and holds no tool call.
        one_off: a completion without an id: a conversation of this one turn.
        final: the client says that it is the last one.
    """

    path: str
    raw: bytes
    body: dict[str, Any]
    explicit_id: str | None
    candidates: list[Digest]
    one_off: bool
    final: bool
    request_id: str | None
    arrived_s: float
    streamed: bool = False
    started: bool = False
    conversation_id: str | None = None
    at_decoder: bool = False
    plan: TurnPlan | None = None
    ttft_s: float | None = None
    tbt_s: list[float] = field(default_factory=list)
    effective: bool = False


class Turns:
    """The ASGI endpoint of `/v1/chat/completions` and `/v1/completions`."""

    def __init__(
        self, settings: Settings, table: TableClient, upstream: Upstream, router_id: str
    ) -> None:
        self._router_id = router_id
        self._settings = settings
        self._table = table
        self._upstream = upstream
        self.started = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived_s = time.perf_counter()
        try:
            turn = await self._read(scope, receive, arrived_s)
        except ApiError as error:
            self._observe("refused", arrived_s)
            await _refuse(error, [], send)
            return
        if turn is None:
            return  # The client left while it sent its request.
        serving = asyncio.ensure_future(self._serve(turn, send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                serving.cancel()
            outcome = await self._outcome(turn, serving, send)
        finally:
            leaving.cancel()
            serving.cancel()
        self._observe(outcome, arrived_s, turn)
        if (turn.final or turn.one_off) and turn.plan is not None:
            self._table.tell("release", turn.plan.conversation_id, "final")

    def unknown_model(self, model: str) -> ApiError:
        """404, and what there is instead."""
        return ApiError(
            404,
            f"the model {model[:100]!r} is not served here; use {self._settings.model_id!r}",
            "model_not_found",
            param="model",
        )

    # --- the request -------------------------------------------------------------------------

    async def _read(self, scope: Scope, receive: Receive, arrived_s: float) -> Turn | None:
        headers = Headers(scope=scope)
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                raw = await self._body(headers, receive)
        except TimeoutError:
            raise ApiError(
                408, f"the request was not whole after {_BODY_TIMEOUT_S:g} s", "timeout"
            ) from None
        if raw is None:
            return None
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            raise ApiError(400, "the body is not valid JSON") from None
        if not isinstance(body, dict):
            raise ApiError(400, "the body must be a JSON object")
        model = body.get("model", self._settings.model_id)
        if not isinstance(model, str):
            raise ApiError(400, "model must be a string", param="model")
        if model != self._settings.model_id:
            raise self.unknown_model(model)
        chat = scope["path"] == _CHAT
        if chat:
            _check_messages(body.get("messages"))
        elif not body.get("prompt"):
            raise ApiError(400, "prompt must not be empty", param="prompt")
        try:
            explicit_id = identity.explicit_id(headers, body)
        except identity.InvalidConversationId as error:
            raise ApiError(400, str(error), "invalid_conversation_id", param=error.source) from None
        own = {**identity.without_identity(body)}
        for name in _NOT_FORWARDED:
            own.pop(name, None)
        if "model" not in own:
            own["model"] = model
        return Turn(
            path=scope["path"],
            raw=raw if own == body else json.dumps(own).encode(),
            body=own,
            explicit_id=explicit_id or (None if chat else identity.new_id()),
            candidates=(
                recognition.candidate_digests(body["messages"])
                if chat and explicit_id is None
                else []
            ),
            one_off=explicit_id is None and not chat,
            final=identity.is_final(headers),
            request_id=_request_id(headers),
            arrived_s=arrived_s,
        )

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        limit = self._settings.max_body_bytes
        announced = headers.get("content-length", "0")
        too_long = ApiError(413, f"the body is longer than {limit} bytes", "body_too_long")
        if announced.isdigit() and int(announced) > limit:
            raise too_long
        parts, length = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            length += len(parts[-1])
            if length > limit:
                raise too_long
            if not message.get("more_body"):
                return b"".join(parts)

    # --- where it goes -----------------------------------------------------------------------

    async def _serve(self, turn: Turn, send: Send) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                plan = turn.plan = await self._place(turn)
                turn.at_decoder = False
                await self._answer(turn, plan, send)
                return
            except EngineUnreachable as error:
                logger.warning("turn attempt %d: %s", attempt + 1, error)
                if turn.plan is not None:
                    await self._after_failure(turn.plan, str(error))
                if turn.started:
                    raise ApiError(
                        503,
                        "the engine was lost during this turn; send the turn again, "
                        "it will be served by another one",
                        "engine_lost",
                    ) from None
                turn.explicit_id = turn.explicit_id or turn.conversation_id
                turn.plan = None
        raise ApiError(
            503, f"engines failed {_ATTEMPTS} times on this turn; try again shortly",
            "engine_lost", retry_after_s=5,
        )  # fmt: skip

    async def _place(self, turn: Turn) -> TurnPlan:
        answer = await self._claim("begin", turn.explicit_id, turn.candidates)
        turn.conversation_id = answer.conversation_id
        if not isinstance(answer, Unplaced):
            if answer.prefiller_url is not None:
                turn.plan = answer
                counter = (answer.decoder_url, answer.decoder_id)
                prompt, _, _ = await self._count(turn, *counter)
                await self._prefill(turn, answer, prompt)
            return answer
        try:
            counter = (answer.tokenizer_url, answer.tokenizer_id)
            prompt, tokens, longest = await self._count(turn, *counter)
            if longest >= answer.max_model_len:
                raise context_length_exceeded(longest, answer.max_model_len)
        except BaseException:
            self._table.tell("forgo", answer.conversation_id)
            raise
        try:
            waited_s = time.perf_counter() - turn.arrived_s
            placed = await self._claim("place", answer.conversation_id, tokens, waited_s)
        except asyncio.CancelledError:
            # A refusal has settled it already; only who leaves is still in line.
            self._table.tell("forgo", answer.conversation_id)
            raise
        assert isinstance(placed, TurnPlan)
        if placed.prefiller_url is not None:
            turn.plan = placed
            await self._prefill(turn, placed, prompt)
        return placed

    async def _claim(self, method: str, *arguments: Any) -> TurnPlan | Unplaced:
        """Ask the table for a turn, and give it back if the client leaves before the answer."""
        asking = asyncio.ensure_future(self._table.call(method, self._router_id, *arguments))
        try:
            answer = await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(self._give_back)
            raise
        if isinstance(answer, Refusal):
            raise ApiError(
                answer.status, answer.message, answer.code, retry_after_s=answer.retry_after_s
            )
        assert isinstance(answer, TurnPlan | Unplaced)
        return answer

    def _give_back(self, asking: "asyncio.Future[Any]") -> None:
        if asking.cancelled() or asking.exception() is not None:
            return
        answer = asking.result()
        if isinstance(answer, TurnPlan):
            self._abandon(answer)
        elif isinstance(answer, Unplaced):
            self._table.tell("forgo", answer.conversation_id)

    def _abandon(self, plan: TurnPlan) -> None:
        turn = (plan.conversation_id, plan.incarnation, plan.turn_id)
        self._table.tell("abandon", *turn, None, None)

    async def _count(self, turn: Turn, url: str, engine_id: str) -> tuple[Any, int, int]:
        """The prompt, as token ids where possible, its length, and that of its longest part."""
        model = {"model": turn.body["model"]}
        try:
            if turn.path == _CHAT:
                tokens = await self._upstream.count_tokens(url, {**model, **_rendered(turn.body)})
                return tokens, len(tokens), len(tokens)
            prompt = turn.body["prompt"]
            if isinstance(prompt, str):
                tokens = await self._upstream.count_tokens(url, {**model, "prompt": prompt})
                return tokens, len(tokens), len(tokens)
            lengths = await self._count_prompts(prompt, url, model)
            return prompt, sum(lengths), max(lengths)
        except EngineUnreachable as error:
            await self._report_if_lost(engine_id, url, str(error))
            raise

    async def _count_prompts(self, prompt: Any, url: str, model: dict[str, Any]) -> list[int]:
        if not isinstance(prompt, list):
            raise ApiError(400, "prompt must be a string or a list", param="prompt")
        if all(isinstance(item, int) for item in prompt):
            return [len(prompt)]
        lengths = []
        for item in prompt:
            if isinstance(item, str):
                body = {**model, "prompt": item}
                lengths.append(len(await self._upstream.count_tokens(url, body)))
            elif isinstance(item, list):
                lengths.append(len(item))
            else:
                raise ApiError(400, "prompt must hold strings or token ids", param="prompt")
        return lengths

    async def _prefill(self, turn: Turn, plan: TurnPlan, prompt: Any) -> None:
        assert plan.prefiller_url is not None
        assert plan.prefiller_id is not None
        body = {"model": turn.body["model"], "prompt": prompt, "max_tokens": 1, "temperature": 0}
        if "cache_salt" in turn.body:
            body["cache_salt"] = turn.body["cache_salt"]
        done: Prefilled | None = None
        try:
            done = await self._upstream.prefill(plan.prefiller_url, body)
        except (EngineUnreachable, ApiError) as error:
            # No turn fails for want of a prefiller: its decoder computes what it does not find.
            logger.warning("prefill on %s: %s", plan.prefiller_id, error)
            if isinstance(error, EngineUnreachable) or error.status >= 500:
                await self._report_if_lost(plan.prefiller_id, plan.prefiller_url, str(error))
        finally:
            self._table.tell("prefilled", plan, done)

    # --- the answer --------------------------------------------------------------------------

    async def _answer(self, turn: Turn, plan: TurnPlan, send: Send) -> None:
        headers = {
            "Content-Type": "application/json",
            wire.CONVERSATION_HEADER: plan.conversation_id,
            wire.INCARNATION_HEADER: str(plan.incarnation),
            wire.TURN_HEADER: str(plan.turn_id),
        }
        if turn.path == _CHAT:
            headers[wire.RECOGNISE_HEADER] = "1"
        if plan.later and plan.prefiller_id is not None:
            headers[wire.PREFILLED_HEADER] = "1"
        if turn.request_id:
            headers["x-request-id"] = turn.request_id
        turn.at_decoder = True
        async with self._upstream.post(plan.decoder_url + turn.path, turn.raw, headers) as response:
            if response.status != 200:
                error = await engine_error(response)
                if error.status >= 500 and not await self._upstream.healthy(plan.decoder_url):
                    raise EngineUnreachable(f"decoder {plan.decoder_id} answered {error.status}")
                raise error
            await self._pass_on(turn, plan, response, send)

    async def _pass_on(
        self, turn: Turn, plan: TurnPlan, response: aiohttp.ClientResponse, send: Send
    ) -> None:
        turn.streamed = response.content_type == "text/event-stream"
        if not turn.streamed:
            # Whole before the first byte, so that an engine's death can be made good elsewhere.
            whole = await response.read()
            turn.effective = turn.path == _CHAT and _TOOL_CALL not in whole
            turn.started = True
            await send(_start(response, plan, length=len(whole)))
            await send({"type": "http.response.body", "body": whole})
            return
        ending: deque[bytes] = deque(maxlen=3)
        effective = turn.path == _CHAT
        last_s = 0.0
        async for part in response.content.iter_any():
            now_s = time.perf_counter()
            if not turn.started:
                turn.started = True
                await send(_start(response, plan))
                turn.ttft_s = now_s - turn.arrived_s
            elif not part.startswith(b"data: [DONE]"):
                # Several events may have come together.
                events = part.count(b"\n\n") - part.endswith(b"data: [DONE]\n\n")
                turn.tbt_s += [(now_s - last_s) / max(events, 1)] * max(events, 1)
            last_s = now_s
            effective = effective and _TOOL_CALL not in part
            ending.append(part)
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        # Nothing may be awaited after that: the server takes the exchange for over, and this
        # turn would count as one whose client has left.
        if b'data: {"error"' in b"".join(ending):
            raise _AnsweredWithError
        turn.effective = effective

    # --- how it ended ------------------------------------------------------------------------

    async def _outcome(
        self, turn: Turn, serving: "asyncio.Future[None]", send: Send
    ) -> Literal["completed", "cancelled", "refused", "failed"]:
        try:
            await serving
            return "completed"
        except asyncio.CancelledError:
            if turn.plan is not None:
                if turn.at_decoder:
                    loop = asyncio.get_running_loop()
                    loop.call_later(_CANCEL_GRACE_S, self._abandon, turn.plan)
                else:
                    self._abandon(turn.plan)
            return "cancelled"
        except _AnsweredWithError:
            assert turn.plan is not None
            await self._after_failure(turn.plan, "an error in the stream")
            return "failed"
        except ApiError as error:
            failure = error
        except TableUnavailable:
            failure = TABLE_RESTARTING
        except Exception:
            logger.exception("unexpected error in a turn")
            failure = ApiError(500, "internal error; see the router's log", "internal_error")
        if turn.plan is not None:
            self._abandon(turn.plan)
        if turn.started:
            await _end_stream_with(failure, turn.streamed, send)
        else:
            await _refuse(failure, _own_headers(turn.conversation_id, turn.plan), send)
        return "refused" if failure.status < 500 else "failed"

    async def _after_failure(self, plan: TurnPlan, why: str) -> None:
        await self._report_if_lost(plan.decoder_id, plan.decoder_url, why)
        self._abandon(plan)

    async def _report_if_lost(self, engine_id: str, url: str, why: str) -> None:
        if not await self._upstream.healthy(url):
            await self._table.call("engine_lost", engine_id, why)

    def _observe(
        self,
        outcome: Literal["completed", "cancelled", "refused", "failed"],
        arrived_s: float,
        turn: Turn | None = None,
    ) -> None:
        latency_s = time.perf_counter() - arrived_s
        if turn is None or turn.plan is None:
            timing = TurnTiming(outcome, latency_s, None, ())
        else:
            ago_s = 0.0 if turn.ttft_s is None else latency_s - turn.ttft_s
            timing = TurnTiming(
                outcome,
                latency_s,
                turn.ttft_s,
                tuple(turn.tbt_s),
                turn.plan.conversation_id,
                turn.plan.incarnation,
                ago_s if turn.effective else None,
            )
        self._table.tell("observe", timing)


class _AnsweredWithError(Exception):
    """The engine ended its stream with an error, which the client has."""


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list with at least one message", param="messages")
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(
                400, f"messages[{position}] must be an object with a role", param="messages"
            )
        if not isinstance(message.get("content"), str | list | None):
            raise ApiError(
                400,
                f"messages[{position}].content must be a string or a list of parts",
                param="messages",
            )


def _request_id(headers: Headers) -> str | None:
    value = headers.get("x-request-id", "")
    return value if 0 < len(value) <= 128 and value.isascii() and value.isprintable() else None


def _rendered(body: dict[str, Any]) -> dict[str, Any]:
    """What of a chat request decides its prompt, as the tokenizer endpoint takes it."""
    rendered = {name: body[name] for name in _RENDERED if name in body}
    # vLLM hands these to the chat template, as arguments; that endpoint has no fields for them.
    extra = {name: body[name] for name in ("reasoning_effort", "documents") if body.get(name)}
    if extra.get("reasoning_effort") is not None:
        extra.setdefault("enable_thinking", extra["reasoning_effort"] != "none")
    if extra:
        given = body.get("chat_template_kwargs")
        rendered["chat_template_kwargs"] = {**extra, **(given if isinstance(given, dict) else {})}
    return rendered


def _own_headers(conversation_id: str | None, plan: TurnPlan | None) -> list[tuple[bytes, bytes]]:
    headers = []
    if conversation_id is not None:
        headers.append((b"x-conversation-id", conversation_id.encode()))
    if plan is not None:
        headers.append((b"x-conserve-decoder", plan.decoder_id.encode()))
    return headers


def _start(response: aiohttp.ClientResponse, plan: TurnPlan, length: int | None = None) -> Message:
    headers = _own_headers(plan.conversation_id, plan)
    for name, value in response.raw_headers:
        if name.lower() in (b"content-type", b"x-request-id"):
            headers.append((name.lower(), value))
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    else:
        headers.append((b"cache-control", b"no-cache"))
    return {"type": "http.response.start", "status": response.status, "headers": headers}


async def _refuse(error: ApiError, own_headers: list[tuple[bytes, bytes]], send: Send) -> None:
    response = error_response(error)
    await send(
        {
            "type": "http.response.start",
            "status": response.status_code,
            "headers": [*response.raw_headers, *own_headers],
        }
    )
    await send({"type": "http.response.body", "body": response.body})


async def _end_stream_with(error: ApiError, streamed: bool, send: Send) -> None:
    if streamed:
        event = b"data: " + json.dumps(error.body()).encode() + b"\n\n"
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
