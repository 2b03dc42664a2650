"""Answers operators and their tools: probes, metrics, events and the dashboard."""

import asyncio
import dataclasses
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from conserve import identity
from conserve.errors import ApiError
from conserve.events import KINDS
from conserve.loopback import is_loopback
from conserve.settings import Settings
from conserve.versions import installed
from conserve.wire import SILENCE_S
from deployments import answers
from deployments.messages import EventQuery
from deployments.router.errors import answer_response
from deployments.router.guard import is_here
from deployments.table_client import TABLE_UP, TableClient, TableUnavailable
from deployments.tables import Tables

_GET = ["GET"]

# --- Probes ---------------------------------------------------------------------------------------

# The body that KubeRay's probes look for, as Serve's own proxy has it.
_SUCCESS = "success"

LIVE, READY, HEALTHZ, VERSION = "/live", "/ready", "/-/healthz", "/version"


class Probes:
    """Knows whether this router lives and can serve turns, as the table last said.

    It answers from that; no probe waits for another process.

    While it is `draining`, load balancers send no more requests here.
    """

    def __init__(self, settings: Settings) -> None:
        self._versions = answers.Versions(**installed(), model=", ".join(settings.each))
        self._heard_s: float | None = None
        # By model. One that can be served is reason enough to send turns here.
        self._can_serve: dict[str, bool] = {}
        self.draining = False

    def heard(self, can_serve: bool | None, model: str = "") -> None:
        """Note that a table answers; None: it does not know yet whether turns can be served."""
        self._heard_s = time.monotonic()
        if can_serve is not None:
            self._can_serve[model] = can_serve

    def not_ready(self) -> str | None:
        """Return why no turn should be sent here now; None: this router can serve turns."""
        if self.draining:
            return "draining: this router ends once it has served what it has"
        if self._heard_s is None:
            return "starting: the conversation table has not answered yet"
        if time.monotonic() - self._heard_s > SILENCE_S:
            return f"the conversation table has not answered for {SILENCE_S:g} s"
        return None if any(self._can_serve.values()) else "no decoder can serve turns now"

    def routes(self) -> list[Route]:
        return [
            Route(LIVE, self._live, methods=_GET),
            Route(READY, self._ready, methods=_GET),
            Route(HEALTHZ, self._healthz, methods=_GET),
            Route(VERSION, self._version, methods=_GET),
        ]

    async def _live(self, request: Request) -> Response:
        return answer_response(answers.Live())

    async def _ready(self, request: Request) -> Response:
        reason = self.not_ready()
        if reason is None:
            return answer_response(answers.Readiness("ready"))
        return answer_response(answers.Readiness("unavailable", reason), 503)

    async def _healthz(self, request: Request) -> Response:
        reason = self.not_ready()
        return PlainTextResponse(reason or _SUCCESS, 200 if reason is None else 503)

    async def _version(self, request: Request) -> Response:
        return answer_response(self._versions)


# --- Metrics --------------------------------------------------------------------------------------

# Prometheus says for how long it will wait. An answer before that tells more than none.
_PATIENCE_HEADER = "x-prometheus-scrape-timeout-seconds"
_PATIENCE_SHARE = 0.8
_LONGEST_S = 60.0


class MetricsPaths:
    """Serves the table's metrics, and addresses of engines and LMCache servers that have theirs."""

    def __init__(self, table: TableClient | Tables) -> None:
        self._table = table

    def routes(self) -> list[Route]:
        return [
            Route("/metrics", self._metrics, methods=_GET),
            Route("/metrics/targets", self._targets, methods=_GET),
        ]

    async def _metrics(self, request: Request) -> Response:
        """Answer with the table's metrics; a scraper that cannot wait is told that it is silent."""
        patience_s = _patience_s(request)
        try:
            async with asyncio.timeout(patience_s or _LONGEST_S):
                text = await self._table.metrics()
        except (TimeoutError, TableUnavailable) as error:
            if patience_s is None:
                raise TableUnavailable("the conversation table does not answer") from error
            text = _silent_table()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _targets(self, request: Request) -> Response:
        """Answer in the form of Prometheus' `http_sd_configs`."""
        engines = await self._table.engines(soon=True)
        found = [*_targets(engines, here=is_here(request.scope))]
        return Response(msgspec.json.encode(found), media_type="application/json")


def _silent_table() -> bytes:
    """Return the answer to a scrape that the table does not answer in time."""
    registry = CollectorRegistry()
    Gauge(*TABLE_UP, registry=registry)
    return generate_latest(registry)


def _patience_s(request: Request) -> float | None:
    """Return how long a scrape may take; None: its client does not say."""
    try:
        said_s = float(request.headers[_PATIENCE_HEADER])
    except (KeyError, ValueError):
        return None
    return min(_LONGEST_S, _PATIENCE_SHARE * said_s) if 0 < said_s < math.inf else None


def _targets(engines: list[answers.Engine], *, here: bool) -> Iterator[answers.Targets]:
    """Yield what a client can reach; what listens on loopback, only to one on this machine."""
    caches: list[str] = []
    for engine in engines:
        address = urlsplit(engine.url)
        on_loopback = is_loopback(address.hostname or "")
        if on_loopback and not here:
            continue
        # vLLM's own metrics have a label `engine`.
        labels = {"part": "engine", "role": engine.role, "replica": engine.id}
        if engine.model:
            labels["model"] = engine.model
        yield answers.Targets([address.netloc], labels)
        if on_loopback and engine.cache_metrics:
            caches.append(engine.cache_metrics)
    # The engines of a node share its server.
    for cache in dict.fromkeys(caches):
        yield answers.Targets([cache], {"part": "lmcache"})


# --- Events ---------------------------------------------------------------------------------------

# The table writes the events anew for each of them.
_LISTENERS = 16
# After so long without an event, a comment shows that the stream lives.
_QUIET_S = 10.0
# For a listener that reads slowly; the logs are asked for no more until it has read.
_MOST_UNSENT = 1024
_LOOK_S = 1.0
# Which log it is of, how far it is then, and what its listener gets.
_Said = tuple[int, int, bytes]
_BROWSERS_HEADER = "last-event-id"
MOST_DIGITS = 18


class Events:
    """Tells listeners what happens at turns' boundaries, from now on or from where they were.

    An event's ``id`` is its number, its ``event`` the kind, and its ``data`` is JSON. A ``missed``
    event counts those that are no longer kept. A stream ends only with its router (``ends``); its
    listener goes on at another one, from where it was. With several models each has a log of its
    own, an event says its ``model``, and an ``id`` has a number for each.
    """

    def __init__(
        self, table: TableClient | Tables, ends: Callable[[], bool] = lambda: False
    ) -> None:
        self._tables = table.of if isinstance(table, Tables) else {"": table}
        self._ends = ends
        self._listeners = 0

    async def serve(self, request: Request) -> Response:
        """Answer a listener."""
        after, kinds = _after(request, len(self._tables)), _kinds(request)
        tenant, own_id = (request.query_params.get(name) for name in ("tenant", "conversation"))
        conversation_id = None if own_id is None else identity.scoped(tenant, own_id)
        if self._listeners >= _LISTENERS:
            raise ApiError(
                429, f"{_LISTENERS} listen already; try again later", "too_many_listeners",
                retry_after_s=30,
            )  # fmt: skip
        queries = [EventQuery(one, kinds, tenant, conversation_id) for one in after]
        told = self._told(queries)
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(told, media_type="text/event-stream", headers=headers)

    async def _told(self, queries: list[EventQuery]) -> AsyncIterator[bytes]:
        """Yield what the logs tell, each as it comes, from where its query begins."""
        self._listeners += 1
        said: asyncio.Queue[_Said] = asyncio.Queue(_MOST_UNSENT)
        # How far the listener is, by log.
        seen = [query.after or 0 for query in queries]
        follow = [
            asyncio.ensure_future(self._follow(said, place, model, query))
            for place, (model, query) in enumerate(zip(self._tables, queries, strict=True))
        ]
        try:
            # Headers are sent with the first words.
            yield b": events\n\n"
            while not self._ends():
                for task in follow:
                    if task.done():
                        # It failed, and the stream with it: its listener comes again.
                        task.result()
                try:
                    place, seen[place], text = await asyncio.wait_for(said.get(), _LOOK_S)
                except TimeoutError:
                    continue
                if text.startswith((b":", b"event: missed")):
                    yield text
                elif text:
                    yield b"id: %b\n%b" % ("-".join(map(str, seen)).encode(), text)
        finally:
            self._listeners -= 1
            for task in follow:
                task.cancel()

    async def _follow(
        self, said: "asyncio.Queue[_Said]", place: int, model: str, query: EventQuery
    ) -> None:
        whose = b'"model":%b,' % json.dumps(model).encode() if model else b""
        while True:
            at = query.after or 0
            try:
                page = await self._tables[model].events(query)
            except TableUnavailable:
                await said.put((place, at, b": the conversation table is being restarted\n\n"))
                await asyncio.sleep(1)
                continue
            if page.missed:
                missed = b'event: missed\ndata: {"events":%d}\n\n' % page.missed
                await said.put((place, at, missed))
            for number, kind, data in page.events:
                event = b"event: %b\ndata: {%b%b\n\n" % (kind.encode(), whose, data[1:])
                await said.put((place, number, event))
            quiet = query.after is not None and not page.events
            await said.put((place, page.newest, b": nothing new\n\n" if quiet else b""))
            # At first, without a wait: where the log is now.
            query = dataclasses.replace(query, after=page.newest, patience_s=_QUIET_S)


def _after(request: Request, logs: int) -> list[int | None]:
    """Return the numbers after which to begin, by log; None: with what happens from now on."""
    text = request.headers.get(_BROWSERS_HEADER) or request.query_params.get("after")
    if text is None:
        return [None] * logs
    numbers = text.split("-")
    plain = all(one.isascii() and one.isdigit() and len(one) <= MOST_DIGITS for one in numbers)
    if not plain or len(numbers) not in (1, logs):
        raise ApiError(400, "after must be the number of an event", param="after")
    # A single one may be 0, for all that is kept.
    return [int(one) for one in (numbers if len(numbers) == logs else numbers * logs)]


def _kinds(request: Request) -> tuple[str, ...]:
    kinds = tuple(request.query_params.getlist("kind"))
    for kind in kinds:
        if kind not in KINDS:
            raise ApiError(400, f"kind {kind[:40]!r}: there are {', '.join(KINDS)}", param="kind")
    return kinds


# --- The dashboard (docs/reference/dashboard.md) --------------------------------------------------

DASHBOARD = "/dashboard"
_FOLDER = Path(__file__).with_name("page")
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
DASHBOARD_FILES = ("page.css", "feed.js", "page.js", "paint.js", "state.js")
DASHBOARD_PATHS = (DASHBOARD, *(f"{DASHBOARD}/{name}" for name in DASHBOARD_FILES))
_HEADERS = {
    # A router of another version has other files.
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Dashboard:
    """Serves a static page that listens to ``GET /v1/events``.

    The page has no data in it, so it needs no key. What it asks for does.
    """

    def routes(self) -> list[Route]:
        """Return the page's paths."""
        return [
            Route(path, self._serve, methods=_GET) for path in (DASHBOARD, DASHBOARD + "/{file}")
        ]

    async def _serve(self, request: Request) -> Response:
        if request.url.path not in DASHBOARD_PATHS:
            raise HTTPException(404)
        name = request.path_params.get("file", "index.html")
        if name == "index.html" and request.scope.get("raw_path", b"").endswith(b"/"):
            # The page's links lead from the path without a slash, whatever a proxy puts before it.
            return RedirectResponse(f"..{DASHBOARD}")
        kind = _TYPES[name.rpartition(".")[2]]
        return FileResponse(_FOLDER / name, media_type=kind, headers=_HEADERS)
