"""ConServe's processes in one event loop: what decides and observes is real, the rest is not.

The conversation table (`TableService`), a router's turns (`TurnEndpoint`) and a decoder's observer,
reporter and `Holdings` are those that run on engines. What is between them can be cut at any
moment: calls are copied as between processes, and whoever is killed says nothing more, to anybody.
"""

import asyncio
import contextlib
import json
import pickle
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import ray
from starlette.datastructures import Headers
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from conserve.direct import Desk
from conserve.holdings import Holdings
from conserve.settings import Settings
from conserve.turn import TurnStats
from conserve.wire import BEAT_S, PARK, Reader, Role
from deployments.engine.reporter import LoadMeter, Reporter
from deployments.engine.turns import EngineTurns
from deployments.engine.vision.images import FailedImages
from deployments.messages import Checked, EngineInfo
from deployments.router.upstream import EngineUnreachable
from deployments.table.table import QUEUE_LIMIT, TableService
from deployments.table_client import TableClient, TableUnavailable
from tests.unit.deployments.asgi import turn_endpoint

_CALL_S = 0.001
# Until a request has come to an engine, and until that has understood it.
_SENT_S, _READ_S = 0.02, 0.02
_PROMPT_TOKEN_S = 0.001
_OUTPUT_TOKEN_S = 0.1
# An answer comes in about so many parts.
_PARTS = 4
_MOST_TOKENS = 4000
_HOST_TOKENS = 30_000
_PARKED = 20  # Prompts; it is not always right what the table thinks of them.


def tokens_of(messages: list[dict[str, Any]]) -> list[int]:
    """A chat's prompt in tokens: one a word, and one a message."""
    ids = []
    for message in messages:
        ids.append(zlib.crc32(message["role"].encode()))
        for word in message["content"].split():
            own = word[0] == "t" and word[1:].isdigit()
            ids.append(int(word[1:]) if own else zlib.crc32(word.encode()))
    return ids


def answer_to(prompt: list[int], output_tokens: int) -> list[int]:
    """What the model answers: each token follows from all before it."""
    state = 0
    for token in prompt:
        state = (state * 31 + token) % 1_000_003
    answer = []
    for _ in range(output_tokens):
        token = state % 997
        answer.append(token)
        state = (state * 31 + token) % 1_000_003
    return answer


def text_of(answer: list[int]) -> str:
    """An answer as text; `tokens_of` leads back to its tokens."""
    return "".join(f" t{token}" for token in answer)


@dataclass
class Process:
    """What can be killed: then none of its tasks goes on, and nobody hears of it."""

    dead: bool = False
    tasks: set["asyncio.Task[Any]"] = field(default_factory=set)

    def start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run something in this process."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def kill(self) -> None:
        """``kill -9``."""
        self.dead = True
        for task in list(self.tasks):
            task.cancel()


@dataclass
class TableProcess(Process):
    """The table's actor."""

    settings: Settings = field(default_factory=Settings)
    queue_limit: int = QUEUE_LIMIT
    calls: set["asyncio.Future[Any]"] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.service = TableService(self.settings, self.queue_limit)

    def kill(self) -> None:
        super().kill()
        if self.service._housekeeping is not None:
            self.service._housekeeping.cancel()
        for call in list(self.calls):
            if not call.done():
                call.set_exception(ray.exceptions.RayActorError())

    def call(self, method: str, arguments: bytes) -> "asyncio.Future[Any]":
        """Call a method; nothing is shared with the caller."""
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.calls.add(answered)
        answered.add_done_callback(self.calls.discard)

        async def run() -> None:
            await asyncio.sleep(_CALL_S)
            try:
                answer = await getattr(self.service, method)(*pickle.loads(arguments))
            except Exception as error:
                if not answered.done():
                    answered.set_exception(error)
                return
            await asyncio.sleep(_CALL_S)
            if not answered.done():
                answered.set_result(pickle.loads(pickle.dumps(answer)))

        self.start(run())
        return answered


@dataclass
class Cluster:
    """What lives."""

    settings: Settings
    table: TableProcess
    engines: dict[str, "Engine"] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    # What the dead wait for: a task that nothing refers to would be collected, with a complaint.
    unheard: list["asyncio.Future[Any]"] = field(default_factory=list)
    # The prompts that are in host memory, for all of them.
    parked: list[list[int]] = field(default_factory=list)


@dataclass
class _Actor:
    """Ray's handle of the table."""

    call: Callable[[str, tuple[Any, ...]], Any]

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self.call(method, arguments))


class Caller(TableClient):
    """`TableClient`, with the table of a `Cluster` in the place of Ray's."""

    def __init__(self, cluster: Cluster, process: Process) -> None:
        super().__init__("chaos", "1", cluster.settings)
        self._cluster = cluster
        self._process = process

    def _connect(self) -> Any:
        return _Actor(self._remote)

    def _remote(self, method: str, arguments: tuple[Any, ...]) -> "asyncio.Future[Any]":
        table = self._cluster.table
        if self._process.dead:
            unheard: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._cluster.unheard.append(unheard)
            return unheard
        if table.dead:
            refused: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            refused.set_exception(ray.exceptions.RayActorError())
            refused.exception()  # Who only tells does not look.
            return refused
        answered = table.call(method, pickle.dumps(arguments))
        answered.add_done_callback(self._told)
        return answered

    def _told(self, answered: "asyncio.Future[Any]") -> None:
        error = None if answered.cancelled() else answered.exception()
        if error is not None and not isinstance(error, ray.exceptions.RayActorError):
            self._cluster.failures.append(f"the table failed: {error!r}")


class _Heard(Caller):
    """An engine's: what it says while it is silent comes later."""

    async def _ask(self, *arguments: Any, **named: Any) -> Any:
        assert isinstance(self._process, Engine)
        while self._process.silent:  # noqa: ASYNC110
            await asyncio.sleep(BEAT_S)
        return await super()._ask(*arguments, **named)


class EngineDead(Exception):
    """The engine core is gone."""


@dataclass
class Engine(Process):
    """A prefiller or a decoder: `EngineTurns` and `Holdings`, around a model that is none.

    Attributes:
        core_dead: its core is gone, and its server still answers, with errors.
        silent: nothing that it says comes to the table.
    """

    cluster: Cluster = None  # type: ignore[assignment]
    name: str = ""
    role: Role = "decoder"
    capacity_tokens: int = 0
    core_dead: bool = False
    silent: bool = False

    def __post_init__(self) -> None:
        self.holdings = Holdings()
        self.desk = Desk(self.holdings, self.cluster.settings.idle_timeout_s)
        self._known: list[list[int]] = []
        self._table = _Heard(self.cluster, self)
        self._reporter = Reporter(self.name, self._table, self.desk)
        self._client = SimpleNamespace(generate=self._generate, tokenizer=None)
        self._requests: dict[str, Any] = {}
        self._load = LoadMeter(self._requests)
        self._turns = EngineTurns(
            self._app, self._client, self.holdings, self.desk,
            meter=self._load, failed=FailedImages(list), missing_tokens=lambda _: 0, stores=False,
            has_more=self._reporter.has_more,
        )  # fmt: skip
        self._exchanges: set[Exchange] = set()
        self.cluster.engines[self.name] = self
        self.start(self._beat())

    def kill(self) -> None:
        super().kill()
        self.cluster.engines.pop(self.name, None)
        for exchange in list(self._exchanges):
            exchange.end(EngineUnreachable(f"{self.name} is gone"))

    async def _register(self) -> None:
        also_hosts = self.role == "prefiller" and self.cluster.settings.prefillers_host
        self.hosts = self.role == "decoder" or also_hosts
        info = EngineInfo(
            self.name, self.role, f"http://{self.name}", 1, self.capacity_tokens, _MOST_TOKENS,
            self.holdings.all(), host_tokens=_HOST_TOKENS if self.cluster.settings.parks else 0,
            parked=self.holdings.parked(),
            also_hosts=also_hosts,
            registration=self._reporter.registering() if self.hosts else 0,
        )  # fmt: skip
        for history_id, incarnation in await self._table.register(info):
            self.holdings.drop(history_id, incarnation)
        self._reporter.registered()

    async def _beat(self) -> None:
        """As `EngineServer` does."""
        await self._register()
        if self.hosts:
            self._reporter.start()
            self.tasks.update(self._reporter.tasks)
        while True:
            await asyncio.sleep(BEAT_S)
            if self.core_dead or self.silent:
                continue
            with contextlib.suppress(TableUnavailable):
                heard = await self._table.beat(self.name, None, self._load.load(0.0))
                if heard is None or not self._reporter.is_registered:
                    await self._register()
                    continue
                for history_id, incarnation in heard.ended:
                    self.holdings.drop(history_id, incarnation)

    def serve(self, path: str, raw: bytes, headers: dict[str, str]) -> "Exchange":
        """Take a turn in."""
        exchange = Exchange(raw)
        self._exchanges.add(exchange)
        names = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "path": path, "headers": names}
        task = self.start(self._turns(scope, exchange.receive, exchange.send))

        def over(_: "asyncio.Task[Any]") -> None:
            self._exchanges.discard(exchange)
            if not task.cancelled() and (error := task.exception()) is not None:
                self.cluster.failures.append(f"{self.name} failed: {error!r}")
            # A server closes the connection of an answer that is not complete.
            exchange.end(EngineUnreachable("the answer has no end"))

        task.add_done_callback(over)
        return exchange

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        """vLLM's server: it ends a request whose client has left."""
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        serving = self.start(self._answer(json.loads(message["body"]), send))
        leaving = self.start(receive())
        try:
            await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
        finally:
            leaving.cancel()
            serving.cancel()

    async def _answer(self, body: dict[str, Any], send: Any) -> None:
        await asyncio.sleep(_READ_S)
        prompt = tokens_of(body["messages"])
        kind = RequestOutputKind.DELTA if body["stream"] else RequestOutputKind.FINAL_ONLY
        sampling = SamplingParams(temperature=0, max_tokens=body["max_tokens"], output_kind=kind)
        id_ = f"r{id(sampling)}"
        request = SimpleNamespace(external_req_id=id_, prompt_len=len(prompt), is_prefilling=True)
        self._requests[id_] = request
        outputs = self._client.generate({"prompt_token_ids": prompt}, sampling, id_)
        media = b"text/event-stream" if body["stream"] else b"application/json"
        headers = [(b"content-type", media)]
        answer: list[int] = []
        began = False
        try:
            async for output in outputs:
                request.is_prefilling = False
                answer += output.outputs[0].token_ids
                if not body["stream"]:
                    continue
                if not began:
                    began = True
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                delta = {"content": text_of(output.outputs[0].token_ids)}
                finish = "length" if output.finished else None
                choice = {"index": 0, "delta": delta, "finish_reason": finish}
                await _send_event(send, {"choices": [choice]})
        except EngineDead:
            error = {"error": {"message": "EngineCore is gone", "code": 500}}
            if not began:
                await send({"type": "http.response.start", "status": 500, "headers": headers})
                whole = json.dumps(error).encode()
                await send({"type": "http.response.body", "body": whole})
                return
            await _send_event(send, error)
        finally:
            del self._requests[id_]
        if body["stream"]:
            done = {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True}
            await send(done)
            await send({"type": "http.response.body", "body": b""})
            return
        message = {"role": "assistant", "content": text_of(answer)}
        whole = {"choices": [{"index": 0, "message": message, "finish_reason": "length"}]}
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(whole).encode()})

    async def _generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        ids, wanted = prompt["prompt_token_ids"], sampling_params.max_tokens
        assert wanted is not None
        await asyncio.sleep(len(ids) * _PROMPT_TOKEN_S)
        answer = answer_to(ids, wanted)
        # It forgets nothing as long as it lives.
        own = _most_common(ids, self._known)
        cached = max(own, _most_common(ids, self.cluster.parked))
        self._known.append([*ids, *answer])
        found = {
            "cached_token_stats": {
                "num_vllm_cached_tokens": own,
                "num_lmcache_extra_cached_tokens": cached - own,
            }
        }
        params = (sampling_params.extra_args or {}).get("kv_transfer_params") or {}
        if params.get(PARK):
            self.cluster.parked.append(ids)
            del self.cluster.parked[:-_PARKED]
        delta = sampling_params.output_kind == RequestOutputKind.DELTA
        size = max(1, wanted // _PARTS)
        for start in range(0, wanted, size):
            part = answer[start : start + size]
            await asyncio.sleep(len(part) * _OUTPUT_TOKEN_S)
            if self.core_dead:
                raise EngineDead
            finished = start + size >= wanted
            if delta or finished:
                shown = part if delta else answer
                reason = "length" if finished else None
                choice = CompletionOutput(0, text_of(shown), shown, None, None, reason)
                yield RequestOutput(
                    request_id, None, ids, None, [choice], finished, num_cached_tokens=cached,
                    kv_transfer_params=found,
                )  # fmt: skip


def _most_common(ids: list[int], others: list[list[int]]) -> int:
    return max((_common(ids, other) for other in others), default=0)


def _common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


class Words:
    """In the place of vLLM's detokenizer, for a model whose tokens are words."""

    def __init__(self) -> None:
        self._text = ""

    @classmethod
    def from_new_request(cls, tokenizer: Any, request: Any) -> "Words":
        return cls()

    def update(self, token_ids: list[int], stopped: bool) -> None:
        """Take in further tokens; no stop string is ever found."""
        self._text += text_of(token_ids)

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """What came since the last time."""
        text, self._text = self._text, ""
        return text


async def _send_event(send: Any, event: dict[str, Any]) -> None:
    part = b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": part, "more_body": True})


class Exchange:
    """A request to an engine and its response, which looks as `aiohttp` has it."""

    def __init__(self, raw: bytes) -> None:
        self._asked: list[Any] = [{"type": "http.request", "body": raw, "more_body": False}]
        self._left = asyncio.Event()
        self._parts: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()
        self._ended = False
        self.began = asyncio.Event()
        self.status = 0
        self.raw_headers: list[tuple[bytes, bytes]] = []
        self.content = self

    async def receive(self) -> Any:
        """To the engine."""
        if self._asked:
            return self._asked.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """From the engine."""
        if self._ended or self._left.is_set():
            return
        if message["type"] == "http.response.start":
            self.status, self.raw_headers = message["status"], message["headers"]
            self.began.set()
            return
        if message.get("body"):
            self._parts.put_nowait(message["body"])
        if not message.get("more_body"):
            self.end(None)

    def end(self, error: BaseException | None) -> None:
        """The response is over, or, with an error, broken off."""
        if not self._ended:
            self._ended = True
            self._parts.put_nowait(error)
            self.began.set()

    def leave(self) -> None:
        """The router does not want it any more."""
        self._left.set()

    async def head(self) -> None:
        """Wait for the response's beginning."""
        await self.began.wait()
        if not self.status:
            error = self._parts.get_nowait()
            raise error if isinstance(error, EngineUnreachable) else EngineUnreachable("no answer")

    @property
    def headers(self) -> Headers:
        return Headers(raw=self.raw_headers)

    @property
    def content_type(self) -> str:
        return dict(self.raw_headers)[b"content-type"].decode()

    async def iter_any(self) -> AsyncIterator[bytes]:
        while (part := await self._parts.get()) is not None:
            if isinstance(part, BaseException):
                raise part
            yield part

    async def read(self) -> bytes:
        return b"".join([part async for part in self.iter_any()])


class Upstream:
    """A router's calls to the engines of a `Cluster`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def _engine(self, url: str) -> Engine:
        name = url.removeprefix("http://").partition("/")[0]
        engine = self._cluster.engines.get(name)
        if engine is None:
            raise EngineUnreachable(f"cannot connect to {name}", had_request=False)
        return engine

    async def check(self, url: str, path: str, raw: bytes) -> Checked:
        self._engine(url)
        await asyncio.sleep(0.005)
        if self._engine(url).core_dead:
            raise EngineUnreachable("no tokenizer")
        return Checked([tokens_of(json.loads(raw)["messages"])], multimodal=False, encode_tokens=0)

    async def prefill(self, url: str, path: str, raw: bytes) -> TurnStats:
        prefiller = self._engine(url)
        tokens = len(json.loads(raw)["prompt"])
        await asyncio.sleep(tokens * _PROMPT_TOKEN_S)
        if prefiller.dead or prefiller.core_dead:
            raise EngineUnreachable(f"{prefiller.name} is gone")
        return TurnStats(prefilled_tokens=tokens)

    async def leave(self, url: str, reader: Reader) -> None:
        await asyncio.sleep(_SENT_S)
        with contextlib.suppress(EngineUnreachable):
            self._engine(url)._turns._leave(reader)

    async def healthy(self, url: str) -> bool:
        await asyncio.sleep(0.002)
        try:
            return not self._engine(url).core_dead
        except EngineUnreachable:
            return False

    @contextlib.asynccontextmanager
    async def post(self, url: str, raw: bytes, headers: dict[str, str]) -> AsyncIterator[Any]:
        path = "/" + url.removeprefix("http://").partition("/")[2]
        self._engine(url)
        await asyncio.sleep(_SENT_S)
        exchange = self._engine(url).serve(path, raw, headers)
        try:
            await exchange.head()
            yield exchange
        finally:
            exchange.leave()


@dataclass
class Router(Process):
    """A router's turns, and its beats."""

    cluster: Cluster = None  # type: ignore[assignment]
    name: str = ""

    def __post_init__(self) -> None:
        self.table = Caller(self.cluster, self)
        upstream: Any = Upstream(self.cluster)
        self.turns = turn_endpoint(self.cluster.settings, self.table, upstream, self.name)
        self.start(self._beat())

    async def _beat(self) -> None:
        while True:
            with contextlib.suppress(TableUnavailable):
                await self.table.router_beat(self.name)
            await asyncio.sleep(BEAT_S)
