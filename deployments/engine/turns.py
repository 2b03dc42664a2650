"""Follows each request inside an engine's server, from its HTTP exchange to the engine's outputs.

An ASGI app before vLLM's OpenAI server decides what a request is: a check or a prefill (`check`), a
turn of a router (`turn`), or anything else. It also knows what the client is told. The engine
client's ``generate`` knows how many tokens there were and where the prompt's KV came from. A
context variable joins the two.
"""

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

import pybase64
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.multimodal.media.image import ImageMediaIO

from conserve import wire
from conserve.apis import COUNT_TOKENS, RESPONSES
from conserve.clock import unix_s
from conserve.direct import Alone, Continued, Desk, Digested, Ended, Rejoined, Stored
from conserve.holdings import Holdings
from conserve.media import lifted_media
from conserve.recognition import Digest
from conserve.recognition.apis import messages_of
from conserve.recording import block_digests
from conserve.turn import TurnKey, TurnStats
from conserve.wire import CHECK_PREFIX, PREFILL_PREFIX, SILENCE_S
from deployments.engine.adapters import EngineAdapters
from deployments.engine.answers import Answer
from deployments.engine.check import Check, one_token
from deployments.engine.copies import Copies
from deployments.engine.reporter import ALL_TOKENS, LoadMeter
from deployments.engine.response_store import ResponseStore, read_asked
from deployments.engine.stored import StoredPrompts
from deployments.engine.turn import EngineTurn, continued
from deployments.engine.vision.images import FailedImages, MissingTokens, images_of
from deployments.event_loop import in_background
from deployments.upstream.message_fields import no_output
from deployments.upstream.prompt_lengths import counting, takes_room_left

_T = TypeVar("_T")
# Base64 by the marks that stand for it in a body.
_Media = Mapping[str, bytes]

_ROOM_LEFT, _NO_OUTPUT = (one[1:].encode() for one in (wire.ROOM_LEFT, wire.NO_OUTPUT))
_SMALL_BYTES = 16 * 1024
# As many answers without readers are kept; most are some hundred kilobytes.
_MOST_ALONE = 1024
# Longer bodies are joined in a thread, beside other turns' tokens.
_PIECE_BYTES = 256 * 1024
# The media of shorter bodies take vLLM a few milliseconds.
_LONG_BYTES = 256 * 1024
# As ``VLLM_MEDIA_CONNECTOR`` names `AsideConnector`.
MEDIA_CONNECTOR = "conserve"
# The media of requests that are served now.
_media: dict[str, bytes] = {}

# The request that is served now; None if it is neither a check nor a router's turn.
_current: ContextVar[Check | EngineTurn | None] = ContextVar("conserve_request", default=None)


def refuse_check(error: Exception) -> None:
    """Answer the current request, if it is a check, with an error and its status."""
    if isinstance(check := _current.get(), Check):
        check.refuse(error)


def skip_media_cache(renderer: Any) -> None:
    """Keep requests that the engine does not get out of the renderer's cache of media.

    Half of that cache is in the engine's core.
    """
    for name in ("render_chat", "render_completion", "preprocess_chat"):
        setattr(renderer, name, _skipping(getattr(renderer, name)))


def _skipping(render: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(render)
    async def rendered(*given: Any, skip_mm_cache: bool = False, **more: Any) -> Any:
        check = _current.get()
        judges = isinstance(check, Check) and not check.prefills
        skip = skip_mm_cache or counting.get() or judges
        return await render(*given, skip_mm_cache=skip, **more)

    return rendered


@dataclass(eq=False)
class EngineTurns:
    """The ASGI app of an engine, around vLLM's; it wraps the ``generate`` of vLLM's client.

    A decoder's `Holdings`, and the report of a turn's end, are up to date before the client learns
    of that end. So the next turn finds its history, however fast it follows.

    Attributes:
        client: vLLM's ``AsyncLLM``.
        tasks: what the model supports, as vLLM judges requests.
        stores: whether the engine has a KV connector, by which it stores what it prefills.
        schedules: whether the engine's scheduler is told which turn each request is.
        copies: told which prompts are left in host memory.
        adapters: None: the engine takes none.
        waiting_tokens: how much of prompts the engine has to compute.
        running: turns that are not over, those included whose router is lost.
        kept: turns that ended of late: a router may die before its client has all.
        ending: whether the engine has been told to end.
    """

    app: ASGIApp
    client: Any
    holdings: Holdings
    desk: Desk
    _: KW_ONLY
    meter: LoadMeter
    failed: FailedImages
    missing_tokens: MissingTokens
    tasks: tuple[str, ...] = ("generate",)
    stores: bool = True
    schedules: bool = False
    copies: Copies | None = None
    adapters: EngineAdapters | None = None
    has_more: Callable[[], None] = lambda: None
    waiting_tokens: Callable[[], int] = lambda: 0
    responses: ResponseStore = field(default_factory=ResponseStore)
    running: dict[TurnKey, EngineTurn] = field(default_factory=dict)
    kept: dict[TurnKey, EngineTurn] = field(default_factory=dict)
    ending: bool = False

    def __post_init__(self) -> None:
        stored = StoredPrompts(self.client) if self.stores else self.client
        self._run: Callable[..., AsyncIterator[Any]] = stored.generate
        self.client.generate = self._generate

    # --- A request ------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A request may be begun within another one's task.
        _current.set(None)
        counting.set(scope.get("path") == COUNT_TOKENS)
        takes_room_left.set(scope.get("query_string") == _ROOM_LEFT)
        no_output.set(scope.get("query_string") == _NO_OUTPUT)
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        told = check = None
        if path.startswith((CHECK_PREFIX, PREFILL_PREFIX)):
            prefills = path.startswith(PREFILL_PREFIX)
            path = path.removeprefix(PREFILL_PREFIX if prefills else CHECK_PREFIX)
            check = Check(path, prefills)
        elif (value := headers.get(wire.TURN_HEADER)) is not None:
            told = wire.DecoderTurn.read(value)
        media: _Media = {}
        if int(headers.get("content-length", 0)) > _LONG_BYTES:
            receive, media = await _lift(receive, told.sent_bytes if told else 0, path)
        with _set_aside(media):
            if check is not None:
                _current.set(check)
                await check.serve(self.app, scope, receive, send)
            elif told is not None:
                await self._serve_turn(told, media, scope, receive, send)
            elif self.ending and path == "/health":
                await Response(status_code=503)(scope, receive, send)
            elif path == wire.LEAVE_PATH:
                self._leave(wire.Reader(*json.loads(await read_ahead(receive))))
                await Response(status_code=204)(scope, receive, send)
            elif path.startswith(wire.STORED_PREFIX):
                await self.responses.tell(scope, receive, send)
            else:
                await self.app(scope, receive, send)

    async def _serve_turn(
        self, told: wire.DecoderTurn, media: _Media, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if (known := self._alone(told)) is not None:
            self.desk.outbox.add(Rejoined(known.key, told.reader.router_id))
            self.has_more()
            await known.answer.follow(told.reader, receive, send)
            return
        path, last = scope["path"], None
        sent: list[wire.Emitted] = []
        continues = told.beginning is not None and told.beginning.continues
        if told.sent_bytes or continues:
            body = await read_ahead(receive)
            sent = wire.read_notes(body[: told.sent_bytes])
            body = body[told.sent_bytes :]
            receive = replay(body, receive)
            if continues:
                last = await _aside(functools.partial(_last_message, path=path), body)
        turn = None if told.rejoins else self._begin(told, path, sent, last)
        if turn is None:
            refused = Response(status_code=wire.REFUSED_STATUS, headers={wire.REFUSED_HEADER: "1"})
            await refused(scope, receive, send)
            return
        _current.set(turn)
        self.running[turn.key] = turn
        receive, send = turn.answer.receives(receive), turn.relay(turn.answer.sends(send))
        try:
            if path == RESPONSES and scope["method"] == "POST":
                raw = await read_ahead(receive)
                receive = replay(raw, receive)
                asked = await _aside(read_asked, raw)
                if asked is not None and asked.request_id:
                    history_id = turn.key.history_id
                    send = await self.responses.keeping(send, history_id, asked, raw, media)
            await self.app(scope, receive, send)
        finally:
            if not turn.reported:
                turn.report(completed=False)
            turn.answer.end()
            del self.running[turn.key]

    def _alone(self, told: wire.DecoderTurn) -> EngineTurn | None:
        """Return the turn whose answer has no reader, and which a turn repeats."""
        if not told.digest or not (told.rejoins or told.straight):
            return None
        kept = None if told.key is None else self.kept.get(told.key)
        alone = (one for one in self.running.values() if one.answer.alone)
        found = alone if kept is None else (kept,)
        return next((one for one in found if one.asked.digest == told.digest), None)

    def _leave(self, reader: wire.Reader) -> None:
        for turn in self.running.values():
            if turn.answer.reader == reader:
                turn.answer.leave()

    def _has_no_reader(self, turn: EngineTurn) -> None:
        self.desk.outbox.add(Alone(turn.key, turn.asked.digest))
        self.has_more()
        alone = [one for one in self.running.values() if one.answer.alone]
        if len(alone) > _MOST_ALONE:
            alone[0].answer.leave()

    def _begin(
        self, told: wire.DecoderTurn, path: str, sent: list[wire.Emitted], last: Any
    ) -> EngineTurn | None:
        """Begin a turn; None if it came straight and the table has to be asked."""
        key = told.key
        if key is None and (asked := told.straight) is not None:
            going_on = Continued(told.root, asked.end, asked.stated_id)
            router_id = told.reader.router_id
            key = self.desk.begin(going_on, router_id, unix_s(), self.waiting_tokens())
            if key is not None:
                self.has_more()
        if key is None:
            return None
        held_tokens = self.holdings.held_tokens(key.history_id)
        if told.key is not None:
            self.holdings.begin(key, told.root or None, told.points, told.looks_up)
        before = told.stats or TurnStats()
        prefilled = before.prefiller_cached_tokens is not None
        stored_tokens = self.holdings.stored_tokens(key.history_id)
        for other in self.running.values():
            if other.answer.alone and other.key.history_id == key.history_id:
                # Its client has gone on without it.
                other.answer.leave()
        answer = Answer(told.reader, lambda: self._has_no_reader(turn))
        turn = EngineTurn(
            told, key, path, last, sent, before,
            stored_tokens=None if told.key is not None and told.looks_up else stored_tokens,
            kept_tokens=self.copies.kept_tokens(key.history_id) if self.copies else None,
            parks=self.desk.parks if told.key is None else told.parks,
            expected_tokens=ALL_TOKENS if prefilled else held_tokens, answer=answer,
            engine_ends=self._engine_ends, reports=self._report,
        )  # fmt: skip
        return turn

    def _report(self, turn: EngineTurn, tails: tuple[Digest, ...], completed: bool) -> None:
        stats = turn.stats if turn.has_begun else None
        self.holdings.finish(turn.key, stats, tails, completed, turn.parks)
        self.desk.outbox.add(Ended(turn.key, stats, tails, completed, turn.asked.digest))
        if completed:
            # Its router may die before the client has the end.
            self.kept[turn.key] = turn
            asyncio.get_running_loop().call_later(SILENCE_S, self.kept.pop, turn.key, None)
        if self.copies is not None and completed:
            in_background(self.copies.own(turn.key.history_id))
        self.has_more()

    def _stored(self, turn: EngineTurn) -> None:
        self.desk.outbox.add(Stored(turn.key, turn.stats.prompt_tokens))
        self.has_more()

    async def _tell_digests(self, turn: EngineTurn, salt: bytes, ids: Any, images: Any) -> None:
        blocks = await asyncio.to_thread(block_digests, salt, ids or (), images)
        self.desk.outbox.add(Digested(turn.key, blocks))
        if turn.reported:
            self.has_more()

    def _engine_ends(self) -> None:
        self.ending = True
        self.desk.close()

    # --- What the engine gets of it -------------------------------------------------------------

    def _generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        request = _current.get()
        if not isinstance(request, Check):
            return self._observed(request, prompt, sampling_params, request_id, options)
        choices = request.choices(sampling_params)
        if request.prefills:
            params = one_token(self.stores)
            stream = self._observed(None, prompt, params, request_id, options)
            return request.prefill(stream, choices)
        known = ("lora_request", "priority", "data_parallel_rank")
        try:
            options = {name: options[name] for name in known if name in options}
            process = self.client.input_processor.process_inputs
            asked = process(request_id, prompt, sampling_params, self.tasks, **options)
        except Exception as error:
            request.refuse(error)
            raise
        return request.judged(asked, self.missing_tokens, request_id, choices)

    async def _observed(
        self, turn: EngineTurn | None, prompt: Any, sampling_params: Any, request_id: str,
        options: dict[str, Any],
    ) -> AsyncIterator[Any]:  # fmt: skip
        images = images_of(prompt)
        identifiers = {identifier for identifier, _ in images}
        model = ""
        if self.adapters is not None and (adapter := options.get("lora_request")) is not None:
            model = adapter.lora_path
            options["lora_request"] = await self.adapters.loaded(model)
        if turn is not None:
            turn.tell_engine(prompt, sampling_params, self.schedules)
            if self.stores and turn.parks and turn.asked.root:
                # Other turns may wait for it.
                options["tells"] = functools.partial(self._stored, turn)
            if self.copies is not None and turn.parks:
                ids, salt = prompt.get("prompt_token_ids"), prompt.get("cache_salt")
                self.copies.keep(turn.key.history_id, ids or (), salt or "", images, model)
        delta = getattr(sampling_params.output_kind, "name", "") == "DELTA"

        def see(output: Any) -> None:
            watched.require_encoded()
            if turn is not None:
                turn.require_an_answer(output, sampling_params)
                turn.see(output, delta)

        stream: Any
        resumes = turn is not None and bool(turn.sent)
        if turn is not None and resumes:
            run = functools.partial(self._run, request_id=request_id, **options)
            sent, tokenizer = turn.sent, self.client.tokenizer
            # It calls `see` with the engine's outputs, and yields others.
            stream = continued(
                sent, prompt, sampling_params, request_id, tokenizer, generate=run, see=see
            )
        else:
            stream = self._run(prompt, sampling_params, request_id, **options)
        expected_tokens = 0 if turn is None else turn.expected_tokens
        missing = self.missing_tokens(images)
        expecting = self.meter.expecting(request_id, expected_tokens, missing)
        salt = b"" if turn is None else self.desk.salt
        with self.failed.watching(request_id, identifiers) as watched:
            async with expecting, contextlib.aclosing(stream):
                async for output in stream:
                    if identifiers:
                        # vLLM tells of failures after it has passed outputs on.
                        await asyncio.sleep(0)
                    if not resumes:
                        see(output)
                    if turn is not None:
                        turn.put_out(output)
                    if salt and turn is not None:
                        # Its first token is there, and other turns go on meanwhile.
                        ids = prompt.get("prompt_token_ids")
                        in_background(self._tell_digests(turn, salt, ids, images))
                        salt = b""
                    yield output


# --- Bodies --------------------------------------------------------------------------------------


async def read_ahead(receive: Receive) -> bytes:
    """Return the whole body, or what there is of it where the client leaves."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            break
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    if sum(map(len, parts)) > _PIECE_BYTES:
        return await asyncio.to_thread(b"".join, parts)
    return b"".join(parts)


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that first gives a body that was read already."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


async def _aside(work: Callable[[bytes], _T], body: bytes) -> _T:
    """Do work on a body, in a thread if it is long: this one passes other turns' tokens on."""
    if len(body) <= _SMALL_BYTES:
        return work(body)
    return await asyncio.to_thread(work, body)


def _last_message(raw: bytes, path: str) -> Any:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None  # The engine refuses it.
    return messages_of(path, body)[-1] if isinstance(body, dict) else None


async def _lift(receive: Receive, noted: int, path: str) -> tuple[Receive, _Media]:
    """Return a ``receive`` with marks for media behind a body's notes, and what marks stand for."""
    body = await read_ahead(receive)
    lifted = await asyncio.to_thread(lambda: lifted_media(body[noted:], path))
    return replay(body[:noted] + lifted.raw, receive), lifted.spans


@contextlib.contextmanager
def _set_aside(media: _Media) -> Iterator[None]:
    """Set a body's media aside while its request is served.

    On the event loop, vLLM would take half a second for 40 MB of base64. It gets the data where it
    decodes the image, in threads of its own, by `AsideConnector`.
    """
    _media.update(media)
    try:
        yield
    finally:
        for mark in media:
            del _media[mark]


@MEDIA_CONNECTOR_REGISTRY.register(MEDIA_CONNECTOR)
class AsideConnector(MediaConnector):  # type: ignore[misc]  # vLLM's types are not looked at.
    """Reads the data that were set aside."""

    def _load_data_url(self, url: str, media_io: Any) -> Any:
        head, _, mark = url.partition(",")
        data = _media.get(mark)
        if data is None:
            return super()._load_data_url(url, media_io)
        if isinstance(media_io, ImageMediaIO):
            # Without a copy as text.
            return media_io.load_bytes(pybase64.b64decode(data, validate=True))
        return super()._load_data_url(f"{head},{data.decode()}", media_io)
