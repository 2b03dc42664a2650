"""Watches a decoder's turns by the engine's own statistics, and reports them to the table.

An ASGI middleware before vLLM's OpenAI server knows which turn it is and what the client was told.
The engine client's ``generate`` knows how many tokens there were and where the prompt's KV came
from. A context variable joins the two.
"""

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conserve import wire
from conserve.apis import form_of
from conserve.clock import unix_s
from conserve.direct import Continued, Desk, Ended
from conserve.holdings import Holdings
from conserve.pausing import tool_called
from conserve.recognition import Digest
from conserve.recognition.apis import answers_of, messages_of
from conserve.turn import TurnKey, TurnStats
from conserve.wire import Emitted
from deployments.engine.asgi import TURN, aside, is_stream, read_ahead, replay
from deployments.engine.continuation import can_be_continued, continued
from deployments.engine.copies import Copies
from deployments.engine.load import ALL_TOKENS, LoadMeter
from deployments.engine.vision.failures import FailedImages
from deployments.engine.vision.node_images import MissingTokens, images_of


@dataclass(slots=True)
class _Observation:
    asked: wire.DecoderTurn
    key: TurnKey
    stored_tokens: int | None
    parks: bool
    # Tokens of its prompt that caches should have.
    expected_tokens: int
    # The outputs of an engine before this one, where the stream is continued.
    sent: list[Emitted]
    # Called when the engine aborts its requests because it is told to end.
    engine_ends: Callable[[], None]
    # Whether outputs are noted, for another engine to continue, and those that are in no event yet.
    notes: bool
    unnoted: list[Emitted] = field(default_factory=list)
    # The turn's record as it came, and as it is now.
    before: TurnStats = field(default_factory=TurnStats)
    stats: TurnStats = field(default_factory=TurnStats)
    started: int = 0
    finished: int = 0
    output_tokens: dict[tuple[str, int], int] = field(default_factory=dict)
    encoded: wire.Encoded = wire.NOTHING_ENCODED
    stages: wire.StageTimes = wire.NO_STAGES

    @property
    def has_begun(self) -> bool:
        """Whether the engine has done anything for the turn."""
        return self.stats.prompt_tokens > 0

    def tell_engine(self, prompt: Any, sampling_params: Any, schedules: bool) -> None:
        """Tell a request's connector and scheduler of the turn, before the engine gets it."""
        # These also ask LMCacheMPConnector for its statistics.
        extra = dict(sampling_params.extra_args or {})
        prefilled = self.before.prefiller_cached_tokens is not None
        params = wire.transfer_params(self.stored_tokens, self.parks, prefilled=prefilled)
        extra["kv_transfer_params"] = {**(extra.get("kv_transfer_params") or {}), **params}
        if schedules:
            history_key = wire.history_key(self.key.history_id, self.key.incarnation)
            extra["kv_transfer_params"] |= wire.scheduled_turn(
                history_key, self.asked.resume_s, self.asked.last
            )
        sampling_params.extra_args = extra
        self.started += 1
        # An answer in one piece tells nothing before its end, which it may not reach.
        given = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        self._has_prompt(given)
        self.notes &= self.started == 1 and can_be_continued(prompt, sampling_params)

    def _has_prompt(self, ids: Any) -> None:
        self.stats.prompt_tokens = max(self.stats.prompt_tokens, len(ids or ()))

    def see(self, output: Any, delta: bool) -> None:
        stats = self.stats
        self._has_prompt(output.prompt_token_ids)
        for choice in output.outputs:
            key = (output.request_id, choice.index)
            new = len(choice.token_ids)
            self.output_tokens[key] = self.output_tokens.get(key, 0) + new if delta else new
            stats.output_tokens = max(stats.output_tokens, self.output_tokens[key])
        found = wire.cached_tokens(output.kv_transfer_params)
        if found.own_tokens is not None and found.lmcache_tokens is not None:
            if found.lmcache_tokens >= stats.lmcache_tokens:
                stats.decoder_cached_tokens = found.own_tokens
                stats.lmcache_tokens = found.lmcache_tokens
        elif output.num_cached_tokens is not None and not stats.lmcache_tokens:
            cached_tokens = max(stats.decoder_cached_tokens, output.num_cached_tokens)
            stats.decoder_cached_tokens = cached_tokens
        stats.missed_tokens = max(stats.missed_tokens, found.missed_tokens)
        stats.late |= found.late
        told = wire.engine_told(output.kv_transfer_params)
        if told.waited_s is not None and told.waited_s >= (stats.engine_wait_s or 0.0):
            stats.engine_wait_s, stats.engine_wait_for = told.waited_s, told.waited_for
        if told.kept_tokens is not None:
            stats.kept_tokens, stats.kept_s = told.kept_tokens, told.kept_s
        # Each output of several choices has what all have said so far.
        self.encoded = own = max(self.encoded, wire.encoded(output.ec_transfer_params))
        stats.encoded_tokens = own.tokens
        stats.encoded_images = self.before.encoded_images + own.images
        stats.node_images = self.before.node_images + own.node_images
        # Of several choices, the one that took longest.
        self.stages = max(self.stages, told.stages, key=sum)
        stats.encode_wait_s, stats.encode_s, stats.prefill_s = self.stages
        self._see_times(output.metrics)
        if output.finished:
            self.finished += 1

    def _see_times(self, times: Any) -> None:
        """Take over vLLM's times of the request, or of the last of several."""
        stats = self.stats
        stats.engine_queued_s = stats.engine_prefill_s = None
        if times is None:
            return
        if 0 < times.first_token_ts <= times.last_token_ts:
            decode_s = times.last_token_ts - times.first_token_ts
            stats.decode_s = max(stats.decode_s or 0.0, decode_s)
        if 0 < times.queued_ts <= times.scheduled_ts <= times.first_token_ts:
            stats.engine_queued_s = times.scheduled_ts - times.queued_ts
            stats.engine_prefill_s = times.first_token_ts - times.scheduled_ts

    def put_out(self, output: Any) -> None:
        # Only the table is told; vLLM would pass it on to the client.
        output.kv_transfer_params = output.ec_transfer_params = None
        # Clients are told what no engine computed for this turn.
        most = self.before.prefiller_cached_tokens
        if most is not None and output.num_cached_tokens is not None:
            computed = max(0, output.num_cached_tokens - most)
            output.num_cached_tokens -= computed
            # The Messages API also tells what was computed and is in a cache now.
            if output.num_cache_creation_tokens is not None:
                output.num_cache_creation_tokens += computed
        if self.stats.reused_tokens is None:
            self.stats.reused_tokens = output.num_cached_tokens
        if self.notes:
            self.unnoted += (
                Emitted(choice.token_ids, choice.finish_reason, choice.stop_reason)
                for choice in output.outputs
            )


_current: ContextVar[_Observation | None] = ContextVar("conserve_observation", default=None)


def observe_engine(
    client: Any,
    meter: LoadMeter,
    failed: FailedImages,
    missing_tokens: MissingTokens,
    *,
    schedules: bool = False,
    copies: Copies | None = None,
) -> None:
    """Have an ``AsyncLLM`` report what it does for the current turn.

    With `schedules`, the engine's scheduler is told which turn each request is; `copies` are told
    which prompts are left in host memory.
    """
    generate = client.generate

    @functools.wraps(generate)
    async def observed(
        prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        observation = _current.get()
        images = images_of(prompt)
        identifiers = {identifier for identifier, _ in images}
        if observation is not None:
            observation.tell_engine(prompt, sampling_params, schedules)
            # LMCache's keys of images are not their tokens.
            if copies is not None and observation.parks and not images:
                ids, salt = prompt.get("prompt_token_ids"), prompt.get("cache_salt")
                copies.keep(observation.key.history_id, ids or (), salt or "")
        delta = getattr(sampling_params.output_kind, "name", "") == "DELTA"

        def see(output: Any) -> None:
            watched.require_encoded()
            if observation is not None:
                _require_an_answer(output, sampling_params, observation)
                observation.see(output, delta)

        stream: Any
        resumes = observation is not None and bool(observation.sent)
        if observation is not None and resumes:
            run = functools.partial(generate, request_id=request_id, **options)
            sent, tokenizer = observation.sent, client.tokenizer
            # It calls `see` with the engine's outputs, and yields others.
            stream = continued(
                sent, prompt, sampling_params, request_id, tokenizer, generate=run, see=see
            )
        else:
            stream = generate(prompt, sampling_params, request_id, **options)
        expected_tokens = 0 if observation is None else observation.expected_tokens
        expecting = meter.expecting(request_id, expected_tokens, missing_tokens(images))
        with failed.watching(request_id, identifiers) as watched:
            async with expecting, contextlib.aclosing(stream):
                async for output in stream:
                    if identifiers:
                        # vLLM tells of failures after it has passed outputs on.
                        await asyncio.sleep(0)
                    if not resumes:
                        see(output)
                    if observation is not None:
                        observation.put_out(output)
                    yield output

    client.generate = observed


def _require_an_answer(output: Any, params: Any, observation: _Observation) -> None:
    """Raise where vLLM passes on an output that is no answer.

    Raises:
        EngineDeadError: the engine is told to end and aborts its requests, which would look like
            the answer's own end.
        VLLMValidationError: no grammar can be made of what was asked for, which vLLM finds out
            after it has taken the request.
    """
    reasons = {choice.finish_reason for choice in output.outputs}
    if "abort" in reasons:
        # This turn's client has not left, or nothing would read this.
        observation.engine_ends()
        from vllm.v1.engine.exceptions import EngineDeadError

        raise EngineDeadError
    unfit = "error" in reasons and params.structured_outputs is not None
    if unfit and not any(observation.output_tokens.values()):
        from vllm.exceptions import VLLMValidationError

        raise VLLMValidationError(
            "the engine can make no grammar of the output that is asked for; correct or simplify "
            "it",
            parameter="structured_outputs",
        )


@dataclass(eq=False)
class TurnObserver:
    """ASGI middleware that keeps a decoder's `Holdings` and reports each turn's end.

    Both are up to date before the client learns that the turn has ended, so that the next turn
    finds its history, however fast it follows. ``ending`` is whether the engine has been told to
    end, ``waiting_tokens`` how much of prompts it has to compute.
    """

    app: ASGIApp
    holdings: Holdings
    desk: Desk
    has_more: Callable[[], None] = lambda: None
    waiting_tokens: Callable[[], int] = lambda: 0
    ending: bool = False

    def _engine_ends(self) -> None:
        self.ending = True
        self.desk.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        told = _told(scope)
        # A request may be begun within another one's task.
        _current.set(None)
        if told is None:
            if self.ending and scope["type"] == "http" and scope["path"] == "/health":
                await Response(status_code=503)(scope, receive, send)
                return
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        sent: list[Emitted] = []
        continues = told.beginning is not None and told.beginning.continues
        last: Any = None
        if told.sent_bytes or continues:
            body = await read_ahead(receive)
            sent = wire.read_notes(body[: told.sent_bytes])
            body = body[told.sent_bytes :]
            receive = replay(body, receive)
            if continues:
                last = await aside(functools.partial(_last_message, path=path), body)
        key = told.key or self._begin_straight(told)
        if key is None:
            refused = Response(status_code=wire.REFUSED_STATUS, headers={wire.REFUSED_HEADER: "1"})
            await refused(scope, receive, send)
            return
        held_tokens = self.holdings.held_tokens(key.history_id)
        if told.key is not None:
            self.holdings.begin(key, told.root or None, told.points, told.looks_up)
        before = told.stats or TurnStats()
        prefilled = before.prefiller_cached_tokens is not None
        stored_tokens = self.holdings.stored_tokens(key.history_id)
        seen = _Observation(
            told,
            key,
            stored_tokens=None if told.key is not None and told.looks_up else stored_tokens,
            parks=self.desk.parks if told.key is None else told.parks,
            expected_tokens=ALL_TOKENS if prefilled else held_tokens,
            sent=sent,
            engine_ends=self._engine_ends,
            notes=told.notes,
            before=before,
            stats=msgspec.structs.replace(before, encoded_tokens=0),
        )
        turn = _Turn(self, path, seen, last)
        # The response keeper needs it.
        scope = {**scope, TURN: key}
        _current.set(seen)
        try:
            await self.app(scope, receive, turn.relay(send))
        finally:
            if not turn.reported:
                turn.report(completed=False)

    def _begin_straight(self, told: wire.DecoderTurn) -> TurnKey | None:
        """Begin a turn that the table was not asked for; None if it has to be asked."""
        asked = told.straight
        if asked is None:
            return None
        going_on = Continued(told.root, asked.end, asked.stated_id)
        key = self.desk.begin(going_on, asked.router_id, unix_s(), self.waiting_tokens())
        if key is not None:
            self.has_more()
        return key


@dataclass(slots=True)
class _Turn:
    observer: TurnObserver
    path: str
    observation: _Observation
    # The message that the answer continues, if it does.
    last: Any
    status: int = 0
    streamed: bool = False
    parts: list[bytes] = field(default_factory=list)
    reported: bool = False

    def relay(self, send: Send) -> Send:
        ends = form_of(self.path).ends

        async def observed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.streamed = is_stream(message)
                message["headers"] = [*message["headers"], *self._own_headers()]
            elif message["type"] == "http.response.body" and not self.reported:
                part = message.get("body", b"")
                if self.observation.asked.beginning is not None and part:
                    self.parts.append(part)
                # vLLM sends every event as a part of its own.
                if part.startswith(ends) if self.streamed else not message.get("more_body"):
                    self.report(completed=self._completed())
                    if self.streamed and self.observation.has_begun:
                        message["body"] = wire.note(self.observation.stats) + part
                    # The report is sent before the answer's end.
                    await asyncio.sleep(0)
                elif self.streamed and (unnoted := self.observation.unnoted):
                    message["body"] = wire.note(unnoted) + part
                    self.observation.unnoted = []
            await send(message)

        return observed_send

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        """Return what its router is told beside the answer; one in one piece is complete by now."""
        own, seen = [], self.observation
        if seen.asked.key is None:
            own.append((wire.TURN_HEADER.encode(), wire.header_value(seen.key).encode()))
        if not self.streamed and seen.has_begun:
            own.append((wire.SUMMARY_HEADER.encode(), msgspec.json.encode(seen.stats)))
        return own

    def _completed(self) -> bool:
        seen = self.observation
        return self.status == 200 and 0 < seen.started == seen.finished

    def report(self, completed: bool) -> None:
        self.reported = True
        observer, seen = self.observer, self.observation
        stats = seen.stats if seen.has_begun else None
        answers: list[dict[str, Any]] = []
        tails: tuple[Digest, ...] = ()
        if completed and (beginning := seen.asked.beginning) is not None:
            answers = answers_of(self.path, self.parts, self.streamed)
            tails = tuple(tail for one in answers for tail in beginning.tails(one, self.last))
        if stats is not None and answers:
            # The client goes on with one of several choices; the first is as likely as any.
            stats.tool = tool_called(answers[0])
        observer.holdings.finish(seen.key, stats, tails, completed, seen.parks)
        observer.desk.outbox.add(Ended(seen.key, stats, tails, completed))
        observer.has_more()


def _last_message(raw: bytes, path: str) -> Any:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None  # The engine refuses it.
    return messages_of(path, body)[-1] if isinstance(body, dict) else None


def _told(scope: Scope) -> wire.DecoderTurn | None:
    value = Headers(scope=scope).get(wire.TURN_HEADER) if scope["type"] == "http" else None
    return None if value is None else wire.DecoderTurn.read(value)
