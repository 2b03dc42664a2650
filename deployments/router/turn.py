"""Serves turns: where one goes, on a first turn the prefill before it, its answer, and its end."""

import asyncio
import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import aiohttp
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from conserve import identity, wire
from conserve.apis import COMPLETIONS, form_of
from conserve.direct import Home, Homes
from conserve.errors import ApiError, PromptTooLong
from conserve.hints import Hints
from conserve.settings import Settings
from conserve.turn import Outcome, TurnStats
from deployments.event_loop import in_background
from deployments.messages import BeginTurn, CountingEngine, RouterHeard, TurnPlan
from deployments.router.access import tenant_of
from deployments.router.answer import AnsweredWithError, RelayedAnswer, StreamBroken
from deployments.router.errors import TABLE_RESTARTING, RawHeaders, hold_back, refuse, request_id_of
from deployments.router.media import MediaReader
from deployments.router.phases import Phase, Phases
from deployments.router.prompt import (
    CountedPrompt,
    Encoding,
    SystemLengths,
    count_prompt,
    counted_as_sent,
)
from deployments.router.reading import disconnected
from deployments.router.request import ClientRequest, read_request
from deployments.router.stored import StoredResponses
from deployments.router.upstream import (
    TRACE_HEADERS,
    EngineUnreachable,
    StreamRecord,
    Upstream,
    engine_error,
    error_of_event,
)
from deployments.table_client import TableClient, TableUnavailable

if TYPE_CHECKING:
    from deployments.router.spans import Spans, TurnSpan

logger = logging.getLogger("ray.serve")

# How often a turn is tried whose engine cannot be reached, before the client got a byte.
_ATTEMPTS = 3
# A prompt that may be what kills engines is given to two of them at most.
_LOST_AT_MOST = 2
# How long a stream without a decoder waits for one with room. A lost one is replaced sooner.
_REPLACEMENT_S = 300.0
_REPLACEMENT_POLL_S = 1.0
# A decoder reports a cancelled turn itself; this is for the case that it never saw it.
_CANCEL_GRACE_S = 10.0


@dataclass(eq=False)
class TurnEndpoint:
    """The ASGI endpoint of the paths that turns come by (`conserve.apis.TURN_PATHS`)."""

    settings: Settings
    table: TableClient
    upstream: Upstream
    router_id: str
    stored: StoredResponses
    media: MediaReader
    # Ends a conversation, with all models that it has used.
    finish: Callable[[str], None]
    homes: Homes = field(default_factory=Homes)
    # Those that can count a prompt; each next one is asked by another turn.
    counters: deque[CountingEngine] = field(default_factory=deque)
    numbers: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.systems = SystemLengths(self.upstream, self.settings.volatile_text)
        self.encoding = Encoding(self.upstream, self.media.encoders)
        self.spans: Spans | None = None
        if self.settings.tracing.url is not None:
            # Without it, OpenTelemetry is not even loaded.
            from deployments.router import spans

            self.spans = spans.Spans(self.settings, self.router_id)

    def hear(self, heard: RouterHeard) -> None:
        """Take the table's answer to a beat."""
        self.media.encoders.update(heard.encoders)
        self.counters = deque(heard.counters)

    def counter(self) -> CountingEngine | None:
        """Return the engine to count a prompt; None if none is known."""
        self.counters.rotate(-1)
        return self.counters[-1] if self.counters else None

    def lost(self, engine_id: str) -> None:
        """Ask an engine that is lost for no count, until a beat names it again."""
        self.counters = deque(one for one in self.counters if one.id != engine_id)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived_s = time.perf_counter()
        span = None if self.spans is None else self.spans.begin(scope, arrived_s)
        try:
            request = await read_request(scope, receive, self.media, self.stored)
        except ClientDisconnect:
            return
        except ApiError as error:
            latency_s = time.perf_counter() - arrived_s
            refused = TurnStats(
                outcome="refused", latency_s=latency_s, tenant=tenant_of(scope),
                request_id=request_id_of(scope), error=error.code,
            )  # fmt: skip
            self.table.observe(None, refused)
            if span is not None:
                span.end(None, refused)
            await hold_back(error, arrived_s)
            await refuse(error, [], send, scope["path"])
            return
        await Turn(self, request, arrived_s, send, span).run(receive)


@dataclass(slots=True)
class _Attempt:
    """One attempt at a turn.

    Attributes:
        home: the decoder that the turn goes straight to, on a first attempt; None: the table is
            asked.
        appends_to: the decoder of its history, if it appends much: the table may move it.
        refused_by: the decoder that the turn went straight to in vain.
        plan: where it goes, once the table or a decoder has said so; its turn is then under way.
        prefilled: what the plan's prefiller did.
        at_decoder: whether its decoder has the request.
    """

    home: Home | None = None
    appends_to: Home | None = None
    refused_by: str | None = None
    plan: TurnPlan | None = None
    prefilled: TurnStats | None = None
    at_decoder: bool = False


class Turn:
    """A turn under way, from its request to its last byte.

    Args:
        arrived_s: when the request came, by `time.perf_counter`.
        span: None: it is not traced.
    """

    def __init__(
        self,
        endpoint: TurnEndpoint,
        request: ClientRequest,
        arrived_s: float,
        send: Send,
        span: "TurnSpan | None" = None,
    ) -> None:
        self._span = span
        self._settings = endpoint.settings
        self._table = endpoint.table
        self._upstream = endpoint.upstream
        self._homes = endpoint.homes
        self._systems = endpoint.systems
        self._encoding = endpoint.encoding
        self._router_id = endpoint.router_id
        self._counter, self._numbers = endpoint.counter, endpoint.numbers
        self._lost_engine = endpoint.lost
        self._finish = endpoint.finish

        # The request, and what its client has of the answer.
        record: StreamRecord | None = None
        if request.streams:
            continues = self._settings.continue_streams and request.one_stream
            record = StreamRecord(request.path, continues=continues)
        self._request = request
        self._arrived_s = arrived_s
        self._answer = RelayedAnswer(request.path, arrived_s, send, record)

        # What all attempts have come to.
        self._phases = Phases()
        self._phases.all.append(Phase("recognition", arrived_s, time.perf_counter()))
        self._error: str | None = None
        self._history_id: str | None = None
        self._let_in = False
        self._digest = request.digest
        self._lost: set[str] = set()
        self._encoded = TurnStats(client=request.client)
        self._continued = 0

        # The attempt under way.
        self._attempt = self._first_attempt()

    async def run(self, receive: Receive) -> None:
        """Serve the turn to its end, whatever that is, or until its client leaves."""
        serving = asyncio.ensure_future(self._serve())
        leaving = asyncio.ensure_future(disconnected(receive))
        try:
            await self._answer.wait({serving, leaving}, self._own_headers)
            if not serving.done():
                serving.cancel()
            outcome = await self._outcome(serving)
        finally:
            leaving.cancel()
            serving.cancel()
        turn, stats = None if self._plan is None else self._plan.turn, self._stats(outcome)
        self._table.observe(turn, stats)
        if self._span is not None:
            self._span.end(turn, stats, self._phases.all, self._request.model_name)
        if (self._request.final or self._request.one_off) and self._history_id is not None:
            self._finish(self._history_id)

    async def _serve(self) -> None:
        if self._span is not None:
            # For this task alone: the connection's next request may be of another trace.
            TRACE_HEADERS.set(self._span.headers)
        for number in range(_ATTEMPTS):
            try:
                if await self._decode_straight():
                    return
                while True:
                    plan = await self._place()
                    self._let_in = True
                    if await self._decode(plan):
                        return
                    # The answer that it should rejoin has ended meanwhile, or has a reader.
                    self._digest = b""
                    self._attempt = _Attempt(refused_by=plan.decoder_id)
            except EngineUnreachable as error:
                logger.warning("turn attempt %d: %s", number + 1, error)
                await self._has_failed(str(error), error.had_request)
                if self._answer.started and self._sent is None:
                    raise ApiError(
                        503,
                        "the engine was lost during this turn; send the turn again, "
                        "it will be served by another one",
                        "engine_lost",
                    ) from None
                self._attempt = _Attempt(refused_by=self._attempt.refused_by)
                self._require_another_try()
        raise ApiError(
            503, f"engines failed {_ATTEMPTS} times on this turn; try again shortly",
            "engine_lost", retry_after_s=5,
        )  # fmt: skip

    def _require_another_try(self) -> None:
        """Refuse to give the prompt to one more engine, if it may be what ended the others."""
        if len(self._lost) >= _LOST_AT_MOST:
            raise ApiError(
                500,
                f"{len(self._lost)} engines were lost while they worked on this request, so it is "
                "not given to another one; do not send it again as it is",
                "engines_lost",
                final=True,
            )

    # --- where it goes -----------------------------------------------------------------------

    def _first_attempt(self) -> _Attempt:
        asked = self._request
        home = self._homes.find(self._stated_id, asked.chain, self._hints)
        if home is None:
            return _Attempt()
        if self._settings.moves_turns and home.appends_much(asked.size, asked.media):
            return _Attempt(appends_to=home)
        limits = None if asked.tenant is None else asked.tenant.limits
        if limits is not None and (limits.turns, limits.held_tokens) != (None, None):
            # Tenants with these limits must go through the table, which enforces them.
            return _Attempt()
        return _Attempt(home)

    async def _place(self) -> TurnPlan:
        deadline_s = time.monotonic() + _REPLACEMENT_S
        while True:
            try:
                return await self._place_once()
            except ApiError as error:
                # A stream that has begun, and had a decoder, cannot be sent again: it waits for
                # another one, and for room there.
                waits = self._answer.begun and self._let_in and error.status in (429, 503)
                if not waits or time.monotonic() > deadline_s:
                    raise
            if self._plan is not None:
                # It had begun, and its prompt was refused.
                self._table.abandon(self._plan)
                self._attempt = _Attempt()
            await asyncio.sleep(_REPLACEMENT_POLL_S)

    async def _place_once(self) -> TurnPlan:
        counted: CountedPrompt | None = None
        counter = self._first_counter()
        while True:
            if counter is not None:
                counted = await self._count(counter.url, counter.id)
            begin = await self._begin_turn(counter, counted)
            with self._phases.during("wait"):
                answer = await self._table.begin(begin)
            if isinstance(answer, TurnPlan):
                break
            # It is not of a history that is bound, as it seemed.
            self._history_id, counter = answer.history_id, answer.counter
        plan = self._attempt.plan = answer
        self._history_id = plan.turn.history_id
        if plan.rejoins:
            return plan
        await self._encode(plan.prefiller_url or plan.decoder_url)
        if plan.prefiller_url is not None:
            if counted is None:
                counted = await self._count(plan.decoder_url, plan.decoder_id)
            await self._prefill(plan, counted)
        return plan

    def _first_counter(self) -> CountingEngine | None:
        """Return the engine that counts the prompt, before the table is asked; None: not yet.

        A turn that goes on from an answer is mostly of a history that is bound. Then its prompt
        counts only if the turn appends much.
        """
        home, chain = self._attempt.appends_to, self._request.chain
        if home is not None:
            return CountingEngine(home.decoder_id, home.url)
        goes_on = chain is not None and not chain.ends_with_root
        return None if goes_on and self._history_id is None else self._counter()

    async def _begin_turn(
        self, counter: CountingEngine | None, counted: CountedPrompt | None
    ) -> BeginTurn:
        asked, chain, attempt = self._request, self._request.chain, self._attempt
        system_tokens = 0
        if counter is not None and counted is not None:
            most, longest = counter.max_model_len, counted.longest_tokens
            if self._sent is None and most is not None and longest >= most:
                raise PromptTooLong(longest, most)
            system_tokens = await self._systems.length(asked, counted, counter.url)
        if chain is not None and self._sent is not None:
            # The client has a part of the answer already.
            chain = chain._replace(ends_with_root=False)
        return BeginTurn(
            self._router_id,
            next(self._numbers),
            asked.explicit_id,
            chain,
            # Once it has been let in, it has kept its tenant's limits.
            None if self._let_in else asked.tenant,
            self._history_id,
            self._hints,
            attempt.refused_by,
            time.perf_counter() - self._arrived_s,
            None if counted is None else counted.prompt_tokens,
            0 if counted is None else counted.encode_tokens,
            system_tokens,
            b"" if self._sent is not None else self._digest,
            "" if asked.adapter is None else asked.adapter.id,
        )

    @property
    def _hints(self) -> Hints | None:
        return self._request.hints if self._request.hints != Hints() else None

    async def _count(self, url: str, engine_id: str) -> CountedPrompt:
        try:
            counted = counted_as_sent(self._request)
            if counted is None:
                with self._phases.during("count", engine_id):
                    counted = await count_prompt(self._request, self._upstream, url)
                if self._encoding.encoders.has_any:
                    # No engine that computes prompts will encode them.
                    counted = replace(counted, encode_tokens=0)
            if self._sent is None:
                return counted
            sent = wire.read_notes(self._sent)
            return counted.followed_by([id_ for emitted in sent for id_ in emitted.token_ids])
        except EngineUnreachable as error:
            await self._report_if_lost(engine_id, url, str(error), error.had_request)
            raise

    async def _encode(self, url: str) -> None:
        """Have encoders beside the engine at ``url`` encode what is new there, if there are any."""
        if not self._request.to_encode:
            return
        with self._phases.during("encode"):
            broken = await self._encoding.encode(self._request, url, self._encoded)
        for encoder, error in broken:
            with contextlib.suppress(TableUnavailable):
                await self._report_if_lost(encoder.id, encoder.url, str(error), error.had_request)
        self._require_another_try()

    async def _prefill(self, plan: TurnPlan, counted: CountedPrompt) -> None:
        assert plan.prefiller_url is not None
        assert plan.prefiller_id is not None
        asked = self._request
        path, raw = asked.engine_path, asked.raw
        if not counted.multimodal:
            # Nothing is rendered again, and what a stream has put out already goes along.
            path, raw = COMPLETIONS, _token_ids(asked, counted.prompt)
        done: TurnStats | None = None
        try:
            if counted_as_sent(asked) is not None:
                # No engine has judged the request, and one that is refused is not prefilled.
                await self._upstream.check(plan.prefiller_url, asked.engine_path, asked.raw)
            with self._phases.during("prefill", plan.prefiller_id):
                done = await self._upstream.prefill(plan.prefiller_url, path, raw)
            done.add_encoded(self._encoded)
            done.client = asked.client
        except (EngineUnreachable, ApiError) as error:
            # The turn goes on without a prefiller: its decoder computes what it does not find.
            # An engine's own message may quote the prompt.
            why = f"it answered {error.status}" if isinstance(error, ApiError) else str(error)
            logger.warning("prefill on %s: %s", plan.prefiller_id, why)
            had_it = isinstance(error, ApiError) or error.had_request
            if isinstance(error, EngineUnreachable) or error.status >= 500:
                engine = (plan.prefiller_id, plan.prefiller_url)
                await self._report_if_lost(*engine, why, had_it)
        finally:
            self._attempt.prefilled = done
            self._table.prefilled(plan, done)
        self._require_another_try()

    # --- the answer --------------------------------------------------------------------------

    @property
    def _stated_id(self) -> str | None:
        """The conversation's id, as the client states it."""
        return None if self._request.one_off else self._request.explicit_id

    async def _decode_straight(self) -> bool:
        """Have the turn served where its history should live.

        Returns:
            False if that is not known, or the decoder there refuses.
        """
        asked, home = self._request, self._attempt.home
        if home is None:
            return False
        await self._encode(home.url)
        chain, tenant = asked.chain, asked.tenant
        straight = wire.Straight(
            b"" if chain is None else chain.ends[0],
            self._stated_id,
            None if tenant is None else tenant.name,
        )
        root = b"" if chain is None else chain.root
        turn = self._told(straight=straight, root=root, stats=self._encoded)
        try:
            async with self._served(home.url, asked.raw, turn, home.decoder_id) as response:
                found = response.headers
                if response.status == wire.REFUSED_STATUS and wire.REFUSED_HEADER in found:
                    self._homes.forget(self._stated_id, asked.chain)
                    self._attempt = _Attempt(refused_by=home.decoder_id)
                    return False
                if wire.TURN_HEADER in found:
                    key = wire.read_key(found[wire.TURN_HEADER])
                    self._attempt.plan = TurnPlan(key, home.decoder_id, home.url, later=True)
                    self._history_id = key.history_id
                    self._let_in = self._attempt.at_decoder = True
                    home = home._replace(request_bytes=asked.size, media=asked.media)
                    self._homes.remember(self._stated_id, asked.chain, home)
                await self._relay(response, home.decoder_id, home.url)
        except EngineUnreachable:
            self._homes.forget(self._stated_id, asked.chain)
            raise
        return True

    @contextlib.asynccontextmanager
    async def _served(
        self, url: str, body: bytes, turn: wire.DecoderTurn, decoder_id: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send the turn to a decoder; note at the end of ``async with`` what that did."""
        headers = {"Content-Type": "application/json", wire.TURN_HEADER: turn.header()}
        record = self._answer.record
        request_id = self._request.request_id
        if self._sent is not None and record is not None and record.request_id is not None:
            request_id = record.request_id
        if request_id:
            headers["x-request-id"] = request_id
        sent_s = time.perf_counter()
        failed: str | None = None
        self._answer.forget_engine()
        try:
            path = self._request.engine_path
            async with self._upstream.post(url + path, body, headers) as response:
                yield response
        except BaseException as error:
            failed = type(error).__name__
            if not isinstance(error, ApiError):
                in_background(self._upstream.leave(url, turn.reader))
            raise
        finally:
            # A decoder that refused the turn did nothing.
            if failed is not None or self._plan is not None:
                seen = self._answer
                self._phases.served(decoder_id, sent_s, seen.first_s, seen.stats, failed)

    def _told(self, **told: Any) -> wire.DecoderTurn:
        """Return the turn for a decoder; ``told`` is what it hears of where the turn was."""
        asked, record = self._request, self._answer.record
        return wire.DecoderTurn(
            reader=wire.Reader(self._router_id, next(self._numbers)),
            digest=self._digest,
            beginning=None if asked.chain is None else asked.chain.beginning,
            resume_s=asked.hints.expected_resume_s,
            last=bool(asked.hints.last_step),
            background=asked.hints.background,
            notes=record is not None and record.continues,
            **told,
        )

    async def _decode(self, plan: TurnPlan) -> bool:
        """Send the turn to its decoder; returns False if it rejoins an answer that is not there."""
        asked = self._request
        turn = self._told(
            rejoins=plan.rejoins,
            key=plan.turn,
            root=plan.root or b"",
            points=plan.points,
            looks_up=plan.looks_up,
            parks=plan.parks,
            stats=self._attempt.prefilled or self._encoded,
            sent_bytes=0 if self._sent is None else len(self._sent),
        )
        body = asked.raw
        if self._sent is not None:
            self._continued += 1
            logger.info("%s goes on at decoder %s", plan.turn.history_id, plan.decoder_id)
            body = self._sent + body
        self._attempt.at_decoder = True
        async with self._served(plan.decoder_url, body, turn, plan.decoder_id) as response:
            if plan.rejoins and response.status == wire.REFUSED_STATUS:
                return False
            if plan.direct and response.status == 200:
                at = plan.decoder_id, plan.decoder_url
                home = Home(*at, self._hints, asked.size, asked.media)
                self._homes.remember(self._stated_id, asked.chain, home)
            await self._relay(response, plan.decoder_id, plan.decoder_url)
        return True

    async def _relay(
        self, response: aiohttp.ClientResponse, decoder_id: str, decoder_url: str
    ) -> None:
        """Pass a decoder's answer on to its end; raises if it refuses the request, or is lost."""
        path = self._request.path
        if response.status != 200:
            error = await engine_error(response)
            if error.status >= 500 and not await self._upstream.healthy(decoder_url):
                raise EngineUnreachable(f"decoder {decoder_id} answered {error.status}")
            raise error
        try:
            await self._answer.relay(response, self._own_headers())
        except StreamBroken as broken:
            if broken.event is not None and await self._upstream.healthy(decoder_url):
                # It is not lost: what it says is about this request.
                refusal = None if self._answer.started else error_of_event(broken.event)
                if refusal is not None:
                    raise refusal from None
                ending = broken.event + form_of(path).after_error
                await self._answer.end_with_event(ending, self._own_headers())
                raise AnsweredWithError from None
            raise EngineUnreachable(f"decoder {decoder_id}: {broken}") from None

    @property
    def _plan(self) -> TurnPlan | None:
        return self._attempt.plan

    @property
    def _sent(self) -> bytes | None:
        """Notes of a stream that the client has a part of and that can go on; None: no such."""
        record = self._answer.record
        return bytes(record.notes) if record is not None and record.can_resume else None

    def _own_headers(self) -> RawHeaders:
        headers = []
        if (history_id := self._history_id or self._stated_id) is not None:
            own_id = identity.own_id(history_id)
            headers.append((b"x-conversation-id", own_id.encode()))
        if self._plan is not None:
            headers.append((b"x-conserve-decoder", self._plan.decoder_id.encode()))
        if unserved := self._request.unserved_tools:
            headers.append((b"x-conserve-unserved-tools", ",".join(unserved).encode()))
        if ignored := self._request.ignored_fields:
            headers.append((b"x-conserve-ignored-fields", ",".join(ignored).encode()))
        return headers

    # --- how it ended ------------------------------------------------------------------------

    async def _outcome(self, serving: "asyncio.Future[None]") -> Outcome:
        try:
            await serving
            return "completed"
        except asyncio.CancelledError:
            if self._plan is not None:
                if self._attempt.at_decoder:
                    loop = asyncio.get_running_loop()
                    loop.call_later(_CANCEL_GRACE_S, self._table.abandon, self._plan)
                else:
                    self._table.abandon(self._plan)
            return "cancelled"
        except AnsweredWithError:
            await self._has_failed("an error in the stream", had_prompt=True)
            self._error = "engine_error"
            return "failed"
        except ApiError as error:
            failure = error
        except TableUnavailable:
            failure = TABLE_RESTARTING
        except Exception:
            logger.exception("unexpected error in a turn")
            failure = ApiError(500, "internal error; see the router's log", "internal_error")
        self._error = failure.code or str(failure.status)
        if self._plan is not None:
            self._table.abandon(self._plan)
        if not self._answer.started:
            await hold_back(failure, self._arrived_s)
        await self._answer.end_with(failure, self._own_headers())
        return "refused" if failure.status < 500 else "failed"

    async def _has_failed(self, why: str, had_prompt: bool) -> None:
        """Tell the table of the attempt's end, and of its decoder's if that is lost."""
        home, plan = self._attempt.home, self._plan
        if plan is not None:
            await self._report_if_lost(plan.decoder_id, plan.decoder_url, why, had_prompt)
            self._table.abandon(plan)
        elif home is not None:
            await self._report_if_lost(home.decoder_id, home.url, why, had_prompt)

    async def _report_if_lost(self, engine_id: str, url: str, why: str, had_prompt: bool) -> None:
        if not await self._upstream.healthy(url):
            # One that was gone before the prompt came cannot have died of it.
            if had_prompt:
                self._lost.add(engine_id)
            self._lost_engine(engine_id)
            await self._table.engine_lost(engine_id, why)

    def _stats(self, outcome: Outcome) -> TurnStats:
        """Return the turn's record: what its engines have said, and how its client was served."""
        plan, seen, tenant = self._plan, self._answer, self._request.tenant
        stats = TurnStats()
        for known in (self._attempt.prefilled, seen.stats):
            if plan is not None and known is not None:
                stats.merge(known)
        stats.outcome, stats.error = outcome, self._error
        stats.latency_s = time.perf_counter() - self._arrived_s
        stats.phases = self._phases.seconds()
        stats.request_id = self._request.request_id
        stats.tenant = None if tenant is None else tenant.name
        if plan is not None:
            stats.decoder_id, stats.prefiller_id = plan.decoder_id, plan.prefiller_id
            stats.placement, stats.continued = plan.reason, self._continued
            stats.ttft_s, stats.tbt_s = seen.ttft_s, tuple(seen.tbt_s)
            if seen.effective:
                ago_s = 0.0 if seen.ttft_s is None else stats.latency_s - seen.ttft_s
                stats.effective_ago_s = ago_s
        ttft_s = stats.latency_s if stats.ttft_s is None else stats.ttft_s
        stats.in_time = self._request.hints.in_time(stats.latency_s, ttft_s)
        if stats.in_time and outcome in ("refused", "failed"):
            stats.in_time = False
        return stats


def _token_ids(asked: ClientRequest, prompt: Any) -> bytes:
    """Return the body of a completion of a turn's prompt, under the turn's salt."""
    # By default vLLM wants room for more than one token behind it.
    body = {"model": asked.model, "prompt": prompt, "max_tokens": 1}
    if "cache_salt" in asked.body:
        body["cache_salt"] = asked.body["cache_salt"]
    return json.dumps(body).encode()
