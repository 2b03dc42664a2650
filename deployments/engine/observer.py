"""What a decoder sees of each turn, from the engine's own statistics, and tells the table.

Two ends meet here: an ASGI middleware in front of vLLM's OpenAI server, which knows whose turn
it is and what the client was told, and the engine client's ``generate``, which knows how many
tokens there were and where the prompt's KV came from. A context variable joins them.
"""

import asyncio
import contextlib
import functools
import json
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conserve import identity, recognition, wire
from conserve.apis import form_of
from conserve.conversation import TurnKey, TurnStats
from conserve.holdings import Holdings
from conserve.pausing import tool_called
from conserve.recognition import Digest
from conserve.recognition.apis import answers_of, heard
from conserve.wire import Emitted
from deployments.engine.body import read_ahead, replay
from deployments.engine.continuation import can_be_continued, continued
from deployments.engine.load import ALL_TOKENS, LoadMeter
from deployments.table.table_client import TableClient, TableUnavailable

logger = logging.getLogger("ray.serve")

_SMALL_BYTES = 16 * 1024
# An answer must not hang on its bookkeeping. What the table misses, it learns from `Holdings`.
_REPORT_PATIENCE_S = 5.0


@dataclass(slots=True)
class _Observation:
    stored_tokens: int | None = None
    parks: bool = False
    # Where a prefiller has computed the prompt: what it had found of it.
    prefill_cached_tokens: int | None = None
    # Of its prompt, what caches should have.
    expected_tokens: int = 0
    started: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    lmcache_tokens: int = 0
    output_tokens: dict[tuple[str, int], int] = field(default_factory=dict)
    decode_s: float | None = None
    # For streams that may have to be continued: whether to note what is put out, what of it is
    # in no event yet, and what another engine had put out before.
    notes: bool = False
    unnoted: list[Emitted] = field(default_factory=list)
    sent: list[Emitted] = field(default_factory=list)
    # Called when the engine aborts what it has, because it is told to end.
    engine_ends: Callable[[], None] = lambda: None

    def see(self, output: Any, delta: bool) -> None:
        self.prompt_tokens = max(self.prompt_tokens, len(output.prompt_token_ids or ()))
        for choice in output.outputs:
            key = (output.request_id, choice.index)
            new = len(choice.token_ids)
            self.output_tokens[key] = self.output_tokens.get(key, 0) + new if delta else new
        found = wire.cached_tokens(output.kv_transfer_params)
        if found.own_tokens is not None and found.lmcache_tokens is not None:
            self.cached_tokens, self.lmcache_tokens = found.own_tokens, found.lmcache_tokens
        elif output.num_cached_tokens is not None and not self.lmcache_tokens:
            self.cached_tokens = max(self.cached_tokens, output.num_cached_tokens)
        times = output.metrics
        if times is not None and 0 < times.first_token_ts <= times.last_token_ts:
            self.decode_s = max(self.decode_s or 0.0, times.last_token_ts - times.first_token_ts)
        if output.finished:
            self.finished += 1

    def put_out(self, output: Any) -> None:
        # Said to the table alone; vLLM would pass it on to the client.
        output.kv_transfer_params = None
        # Clients are told what was not computed for this turn, by whichever engine.
        most = self.prefill_cached_tokens
        if most is not None and output.num_cached_tokens is not None:
            computed = max(0, output.num_cached_tokens - most)
            output.num_cached_tokens -= computed
            # Messages have a word for what was computed for the turn and is in a cache now.
            if output.num_cache_creation_tokens is not None:
                output.num_cache_creation_tokens += computed
        if self.notes:
            self.unnoted += (
                Emitted(choice.token_ids, choice.finish_reason, choice.stop_reason)
                for choice in output.outputs
            )

    def stats(self) -> TurnStats | None:
        if not self.prompt_tokens:
            return None
        return TurnStats(
            self.prompt_tokens,
            max(self.output_tokens.values(), default=0),
            self.cached_tokens,
            self.lmcache_tokens,
            decode_s=self.decode_s,
        )


_current: ContextVar[_Observation | None] = ContextVar("conserve_observation", default=None)


def observe_engine(client: Any, meter: LoadMeter) -> None:
    """Have an ``AsyncLLM`` report what it does for the turn in whose context it is called.

    Args:
        meter: of its load; is told what turns expect in caches.
    """
    generate = client.generate

    @functools.wraps(generate)
    async def observed(
        prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        observation = _current.get()
        stream = generate(prompt, sampling_params, request_id, **options)
        if observation is None:
            async with contextlib.aclosing(stream):
                async for output in stream:
                    yield output
            return
        # Asks the connector for its statistics; see LMCacheMPConnector.
        extra = dict(sampling_params.extra_args or {})
        extra["kv_transfer_params"] = {
            **(extra.get("kv_transfer_params") or {}),
            **wire.transfer_params(observation.stored_tokens, observation.parks),
        }
        sampling_params.extra_args = extra
        observation.started += 1
        # An answer in one piece says nothing before its end, and may not come to it.
        given = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        observation.prompt_tokens = max(observation.prompt_tokens, len(given or ()))
        delta = getattr(sampling_params.output_kind, "name", "") == "DELTA"
        observation.notes &= observation.started == 1 and can_be_continued(prompt, sampling_params)

        def see(output: Any) -> None:
            _require_an_answer(output, sampling_params, observation)
            observation.see(output, delta)

        if observation.sent:
            run = functools.partial(generate, request_id=request_id, **options)
            sent, tokenizer = observation.sent, client.tokenizer
            # It has the engine's outputs seen, which are other ones than it yields.
            stream = continued(sent, prompt, sampling_params, request_id, tokenizer, run, see)
        expecting = meter.expecting(request_id, observation.expected_tokens)
        async with expecting, contextlib.aclosing(stream):
            async for output in stream:
                if not observation.sent:
                    see(output)
                observation.put_out(output)
                yield output

    client.generate = observed


def _require_an_answer(output: Any, params: Any, observation: _Observation) -> None:
    """Raise where an output is none, though vLLM passes it on as one, or as a failure of its own.

    Raises:
        EngineDeadError: the engine is told to end, and aborts what it has. To the client, that
            would pass for the answer's own end.
        VLLMValidationError: no grammar can be made of what was asked for; vLLM finds that out
            after it has taken the request.
    """
    reasons = {choice.finish_reason for choice in output.outputs}
    if "abort" in reasons:
        # Not by this turn's client, or nobody would be waiting.
        observation.engine_ends()
        from vllm.v1.engine.exceptions import EngineDeadError

        raise EngineDeadError
    unfit = "error" in reasons and params.structured_outputs is not None
    if unfit and not any(observation.output_tokens.values()):
        from vllm.exceptions import VLLMValidationError

        raise VLLMValidationError(
            "the engine can make no grammar of the output that is asked for; mend or simplify it",
            parameter="structured_outputs",
        )


class TurnObserver:
    """ASGI middleware that keeps a decoder's `Holdings` and reports each turn's end.

    The report is made before the client learns that the turn is over, so that the next turn
    finds the table up to date, however fast it follows.

    Args:
        volatile: kinds of text by which no conversation is recognised; see
            `conserve.recognition.volatile`.

    Attributes:
        ending: whether the engine has been told to end: it is not healthy then, though its core
            may take seconds to be gone.
    """

    def __init__(
        self,
        app: ASGIApp,
        engine_id: str,
        holdings: Holdings,
        table: TableClient,
        volatile: Collection[str] = (),
    ) -> None:
        self._app = app
        self._volatile = volatile
        self._engine_id = engine_id
        self._holdings = holdings
        self._table = table
        self._reports: set[asyncio.Task[None]] = set()
        self.ending = False

    def _engine_ends(self) -> None:
        self.ending = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        # One request may be begun within another one's task.
        _current.set(None)
        if wire.CONVERSATION_HEADER not in headers:
            if self.ending and scope["type"] == "http" and scope["path"] == "/health":
                await Response(status_code=503)(scope, receive, send)
                return
            await self._app(scope, receive, send)
            return
        turn = _Turn(
            self._engine_id,
            self._holdings,
            self._table,
            TurnKey(
                headers[wire.CONVERSATION_HEADER],
                int(headers[wire.INCARNATION_HEADER]),
                int(headers[wire.TURN_HEADER]),
            ),
            scope["path"],
        )
        sent_bytes = int(headers.get(wire.SENT_HEADER, 0))
        if sent_bytes or wire.RECOGNISE_HEADER in headers:
            body = await read_ahead(receive)
            turn.observation.sent = wire.read_notes(body[:sent_bytes])
            body = body[sent_bytes:]
            receive = replay(body, receive)
            if wire.RECOGNISE_HEADER in headers:
                tenant = identity.tenant_of(turn.key.conversation_id)
                asked = (body, turn.path, self._volatile, tenant)
                # Other turns' tokens pass through this thread. And nothing is counted yet.
                if len(body) <= _SMALL_BYTES:
                    turn.beginning = _beginning(*asked)
                else:
                    turn.beginning = await asyncio.to_thread(_beginning, *asked)
        turn.observation.notes = wire.NOTES_HEADER in headers
        if wire.PREFILL_CACHED_HEADER in headers:
            turn.observation.prefill_cached_tokens = int(headers[wire.PREFILL_CACHED_HEADER])
        turn.observation.engine_ends = self._engine_ends
        root = bytes.fromhex(headers.get(wire.ROOT_HEADER, ""))
        points = bytes.fromhex(headers.get(wire.POINTS_HEADER, ""))
        look_up = wire.LOOK_UP_HEADER in headers
        self._holdings.begin(turn.key, root or None, points, look_up)
        prefilled = wire.PREFILL_CACHED_HEADER in headers
        held_tokens = self._holdings.held_tokens(turn.key.conversation_id)
        turn.observation.expected_tokens = ALL_TOKENS if prefilled else held_tokens
        if not look_up:
            turn.observation.stored_tokens = self._holdings.stored_tokens(turn.key.conversation_id)
        turn.observation.parks = wire.PARK_HEADER in headers
        _current.set(turn.observation)
        try:
            await self._app(scope, receive, turn.relay(send))
        finally:
            if not turn.reported:
                # This gets a task of its own: the current one may be under cancellation.
                task = asyncio.get_running_loop().create_task(turn.report(completed=False))
                self._reports.add(task)
                task.add_done_callback(self._reports.discard)


@dataclass(slots=True)
class _Turn:
    engine_id: str
    holdings: Holdings
    table: TableClient
    key: TurnKey
    path: str
    observation: _Observation = field(default_factory=_Observation)
    beginning: recognition.Beginning | None = None
    status: int = 0
    streamed: bool = False
    parts: list[bytes] = field(default_factory=list)
    reported: bool = False

    def relay(self, send: Send) -> Send:
        ends = form_of(self.path).ends

        async def observed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.streamed = any(
                    name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                    for name, value in message["headers"]
                )
            elif message["type"] == "http.response.body" and not self.reported:
                part = message.get("body", b"")
                if self.beginning is not None and part:
                    self.parts.append(part)
                # vLLM sends every event as a part of its own.
                if part.startswith(ends) if self.streamed else not message.get("more_body"):
                    await self.report(completed=self._completed())
                elif self.streamed and (unnoted := self.observation.unnoted):
                    message["body"] = wire.note(unnoted) + part
                    self.observation.unnoted = []
            await send(message)

        return observed_send

    def _completed(self) -> bool:
        seen = self.observation
        return self.status == 200 and 0 < seen.started == seen.finished

    async def report(self, completed: bool) -> None:
        self.reported = True
        stats = self.observation.stats()
        answers = self._answers() if completed else []
        tails = self._tails(answers)
        if stats is not None and answers:
            # Of several choices its client goes on with one; the first is as likely as any.
            stats = msgspec.structs.replace(stats, tool=tool_called(answers[0]))
        self.holdings.finish(self.key, stats, tails, completed, self.observation.parks)
        patience = {"patience_s": _REPORT_PATIENCE_S, "answer_s": _REPORT_PATIENCE_S}
        try:
            if not completed:
                await self.table.call("abandon", self.key, self.engine_id, stats, **patience)
            elif not await self.table.call(
                "advance", self.key, self.engine_id, stats, tails, **patience
            ):
                # Ended or moved meanwhile: a table rebuilt from holdings must not revive it.
                self.holdings.drop(self.key.conversation_id, self.key.incarnation)
        except TableUnavailable as error:
            logger.warning("%s: %s", self._name(), error)
        except Exception:
            # A failure of the table is no reason to break off a client's answer.
            logger.exception("%s was not reported", self._name())

    def _name(self) -> str:
        return f"turn {self.key.turn_id} of {self.key.conversation_id}"

    def _answers(self) -> list[dict[str, Any]]:
        if self.beginning is None:
            return []
        return answers_of(self.path, self.parts, self.streamed)

    def _tails(self, answers: list[dict[str, Any]]) -> tuple[Digest, ...]:
        if self.beginning is None:
            return ()
        return tuple(self.beginning.tail_digest(answer) for answer in answers)


def _beginning(
    raw: bytes, path: str, volatile: Collection[str], tenant: str | None
) -> recognition.Beginning | None:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None  # The engine refuses it.
    if not isinstance(body, dict):
        return None
    return recognition.Beginning(*heard(path, body, volatile), tenant)
