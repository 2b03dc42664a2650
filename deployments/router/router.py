"""The router: each replica listens for itself, and passes engines' bytes on as they come.

Measured on two cores with 8 clients, a warm turn of 64 tokens takes 1.05 times as long through it
as without it, and 1.5 times through Serve's own proxy; see docs/lab/overhead.md.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import select
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import ray
import uvicorn
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from conserve.settings import Settings, SettingsError, load
from conserve.wire import BEAT_S, NO_LACK, Lack
from deployments.event_loop import switch_threads_sooner
from deployments.messages import HEAD_NODE, Timeouts
from deployments.node.node import NodeClient
from deployments.router import addons
from deployments.router.certificate import Certificate
from deployments.router.frontdoor import FrontDoor
from deployments.router.listener import Listener
from deployments.table_client import TableUnavailable
from deployments.tables import Tables, tables_of
from deployments.upstream import sigterm_exits
from deployments.upstream.patch import require
from deployments.upstream.patches import apply_patches
from deployments.upstream.seams import require_seams

logger = logging.getLogger("ray.serve")

# A client may get any number of these that it has not asked for, and passes them over
# (https://www.rfc-editor.org/rfc/rfc9110#section-15.2).
_BEFORE_THE_ANSWER = b"HTTP/1.1 100 Continue\r\n\r\n"
# A chunk's size may begin with zeros (https://www.rfc-editor.org/rfc/rfc9112#section-7.1), and the
# last one's may have several; the size itself follows with the next part of the stream.
_BETWEEN_CHUNKS = b"0"
# The event loop reads no more of a connection after its end, and would see a reset at the next
# write.
_LOOK_S = 0.1


# Clients may reuse a connection for so long after an answer; then uvicorn closes it.
KEEP_ALIVE_S = 75
_DRAIN_LOOK_S = 0.5
_STATUS_S = 5.0


@dataclasses.dataclass(eq=False)
class Drain:
    """The end of a router: serves until another one has its socket, then what is connected to it.

    A client that keeps its connection gets ``Connection: close`` with its next answer. If the
    application ends, no other router comes: then new turns are refused, and running ones finish.
    After ``timeout_s`` the rest is cut.
    """

    door: FrontDoor
    server: uvicorn.Server
    listener: Listener
    timeout_s: float
    is_deleted: Callable[[], Awaitable[bool]]

    def announce(self) -> None:
        """Have the router replaced; it serves as before until it is."""
        self.door.probes.draining = True
        self.listener.ending = True

    async def run(self) -> None:
        """Return when nothing is served any more, or the time is up."""
        self.announce()
        deadline_s = time.monotonic() + self.timeout_s
        while not self.listener.taken and time.monotonic() < deadline_s:
            if await self.is_deleted():
                self.door.refusing = True
                break
            await asyncio.sleep(_DRAIN_LOOK_S)
        if not self.door.refusing:
            # The socket itself stays open, and connections that wait in it go to the other router.
            for listening in self.server.servers:
                listening.close()
        idle_s = min(deadline_s, time.monotonic() + KEEP_ALIVE_S)
        state = self.server.server_state
        while time.monotonic() < deadline_s:
            done = self.door.refusing or time.monotonic() >= idle_s
            if not (state.tasks if done else state.connections):
                break
            await asyncio.sleep(_DRAIN_LOOK_S / 5)
        if state.tasks:
            logger.warning("router %d ends with %d requests", os.getpid(), len(state.tasks))
        self.server.should_exit = True


async def is_deleted(application: str) -> bool:
    """Return whether Serve is deleting the application; False if that cannot be found out."""

    def look() -> bool:
        found = serve.status().applications.get(application)
        return found is None or found.status == "DELETING"

    try:
        return await asyncio.wait_for(asyncio.to_thread(look), _STATUS_S)
    except Exception as error:
        logger.warning("Serve's controller does not say whether the application ends: %s", error)
        return False


@serve.deployment(
    # On the head node, whose address clients know; Ray gives every head this resource.
    ray_actor_options={"num_cpus": 0, "resources": {HEAD_NODE: 0.001}},
    health_check_period_s=2,
    health_check_timeout_s=30,
    # A new router listens before the one that it replaces ends.
    max_surge_percent=100,
)
class Router:
    """Listens, and beats so that the conversation table knows that the application lives.

    Handles of engines only make these part of the same application.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it.
        self, settings: Settings, deployment: str, *engines: DeploymentHandle
    ) -> None:
        context = serve.get_replica_context()
        require_seams("half_closed", "ignored_upgrade")
        require(sigterm_exits.PATCH)
        apply_patches("ray")
        switch_threads_sooner()
        self._handles = engines
        self._timeouts: Timeouts | None = None
        self._settings = settings
        table = tables_of(context.app_name, deployment, settings)
        self._tables = (
            table.of if isinstance(table, Tables) else dict.fromkeys(settings.each, table)
        )
        self._id = context.replica_id.unique_id
        self._addons = addons.parts(context.app_name, deployment, settings)
        if settings.nodes == "one":
            # LMCache's server comes up while engines load. If it does not, engines say so; a router
            # that starts again serves without it.
            NodeClient(context.app_name, settings).prepare()
        self._door = FrontDoor(settings, table, self._id, self._addons)
        loop = asyncio.get_running_loop()
        self._lacks: dict[str, Lack] = {}
        self._beating = [loop.create_task(self._beat(one)) for one in self._tables]
        application = f"{ray.get_runtime_context().gcs_address} {context.app_name}"
        listener = Listener(application, settings.host, settings.port, deployment)
        # A certificate that is not usable is said before anything of the port is taken.
        self._server = uvicorn.Server(server_config(self._door, settings))
        if listener.has_others:
            await self._engines_are_there()
        listening = listener.take()
        self._serving = loop.create_task(self._server.serve(sockets=[listening]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise RuntimeError("the router's HTTP server ended while it started")
            await asyncio.sleep(0.01)
        self._drain = Drain(
            self._door,
            self._server,
            listener.offer(),
            settings.drain_timeout_s,
            functools.partial(is_deleted, context.app_name),
        )
        sigterm_exits.at_sigterm(functools.partial(loop.call_soon_threadsafe, self._drain.announce))
        url = f"{settings.scheme}://{settings.host}:{settings.port}"
        logger.info("router %d listens on %s", os.getpid(), url)

    async def _engines_are_there(self) -> None:
        """Wait until turns can be served, before another deployment's routers are replaced.

        At once, unless engines have another model: then its table has none yet.
        """
        while True:
            with contextlib.suppress(TableUnavailable):
                asked = (table.engines(soon=True) for table in self._tables.values())
                found = await asyncio.gather(*asked)
                if all(any(engine.hosts for engine in engines) for engines in found):
                    return
            await asyncio.sleep(BEAT_S)

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        if self._serving.done():
            raise RuntimeError("the router's HTTP server has ended")
        if any(one.done() for one in self._beating):
            raise RuntimeError("the router's beats to the conversation table have ended")
        if self._door.draining:
            raise RuntimeError("the router was told to end by a signal: another one takes over")

    async def reconfigure(self, given: Any) -> None:
        """Take other timeouts, from ``user_config``, without a restart.

        Wrong ones change nothing, and are logged: for an error Serve would end the router.
        """
        try:
            self._timeouts = changed_timeouts(given, self._settings)
        except SettingsError as error:
            logger.error("router: user_config changes nothing: %s", error)

    async def __del__(self) -> None:
        """Serve what runs first; Serve awaits this before it ends the replica."""
        if getattr(self, "_drain", None) is None:
            return  # It never served.
        await self._drain.run()
        await self._serving

    async def _beat(self, model: str) -> None:
        """Beat to a model's table, and with the first one's to add-ons' actors."""
        parts = self._addons if model == next(iter(self._tables)) else []
        while True:
            try:
                for part in parts:
                    part.beat()
                # A router that ends may be of an earlier deployment.
                timeouts = None if self._door.draining else self._timeouts
                others = others_lack(self._lacks, model) if self._settings.share_gpus else None
                heard = await self._tables[model].router_beat(self._id, timeouts, others)
                self._lacks[model] = heard.lack
                self._door.turns[model].hear(heard)
                self._door.probes.heard(heard.can_serve, model)
            except TableUnavailable as error:
                self._lacks.pop(model, None)
                logger.warning("router: %s", error)
            except Exception:
                logger.exception("router: a beat failed")
            await asyncio.sleep(BEAT_S)


def others_lack(lacks: Mapping[str, Lack], model: str) -> Lack:
    """Return what all models but one lack together."""
    others = [lack for name, lack in lacks.items() if name != model]
    return Lack(*map(sum, zip(NO_LACK, *others, strict=True)))


def changed_timeouts(given: Any, settings: Settings) -> Timeouts:
    """Return timeouts, with those that ``user_config`` changes; raises `SettingsError`."""
    names = [field.name for field in dataclasses.fields(Timeouts)]
    if not isinstance(given, dict) or not given.keys() <= set(names):
        raise SettingsError(f"only {' and '.join(names)} change in place; give these by name")
    changed = load(given)
    return Timeouts(*(getattr(changed if name in given else settings, name) for name in names))


def server_config(door: ASGIApp, settings: Settings) -> uvicorn.Config:
    """Return how a router's server listens; raises `CertificateError` without a usable one."""
    certificate = None if settings.tls.files is None else Certificate(settings.tls.files)
    return uvicorn.Config(
        door,
        http=Connection,
        ws="none",
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
        server_header=False,
        ssl_context_factory=None if certificate is None else lambda *_: certificate.context,
    )


class Connection(HttpToolsProtocol):
    """Keeps a connection after its client's last byte, until what was asked is answered.

    A client that has nothing more to send may say so (``shutdown(SHUT_WR)``) and wait for its
    answer. uvicorn takes that for a client that has left
    (https://github.com/Kludex/uvicorn/issues/1264), and turns end then. To TCP both look alike,
    until something is sent: a client that has left altogether resets the connection, and one that
    waits reads on. So bytes are sent that mean nothing to a client of HTTP/1.1.

    It ignores offers of other protocols (https://www.rfc-editor.org/rfc/rfc9110#section-7.8).
    Java's clients offer HTTP/2 with each request, and httptools takes the body for HTTP/2.
    """

    _ended = False
    _looking: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes | memoryview) -> None:
        """Read what has come; again the head of a request with an offer, without the offer."""
        rest = memoryview(data)
        while rest and not self.transport.is_closing():
            self._again, self._behind = b"", len(rest)
            super().data_received(rest)  # type: ignore[arg-type]  # httptools takes both.
            rest = rest[self._behind :]
            if self._again:
                super().data_received(self._again)

    def _should_upgrade(self) -> bool:
        """Let uvicorn ignore the head of a request with an offer, and then call the next method."""
        return self.parser.get_method() != b"CONNECT"

    def handle_websocket_upgrade(self) -> None:
        """Have the head read again that httptools has stopped behind."""
        offer = sys.exception()
        assert offer is not None
        self._behind = offer.args[0]
        line = self.parser.get_method(), self.url, self.parser.get_http_version().encode()
        headers = (b"%b: %b\r\n" % one for one in self.headers if one[0] != b"upgrade")
        self._again = b"%b %b HTTP/%b\r\n%b\r\n" % (*line, b"".join(headers))

    def eof_received(self) -> bool:  # type: ignore[override]  # None would close, as uvicorn does.
        """Say whether the connection is kept: where a whole request is still unanswered."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        # TLS has no half-closed connections, and asyncio closes them.
        if self.transport.get_extra_info("sslcontext") is not None:
            return False
        # Older clients would take the first bytes for the answer.
        if cycle.scope["http_version"] == "1.0":
            return False
        self._ended = True
        # Of several requests the one that is being answered is not known, nor what may be sent.
        if not self.pipeline:
            if not cycle.response_started:
                self.transport.write(_BEFORE_THE_ANSWER)
            elif cycle.chunked_encoding:
                self.transport.write(_BETWEEN_CHUNKS)
        self._look_again()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the application that its client has left, as uvicorn does."""
        if self._looking is not None:
            self._looking.cancel()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        """Begin with a request; the last one of its connection, if the router ends."""
        super().on_headers_complete()
        if getattr(self.config.app, "draining", False) and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        """Go on to the next request, or close after the last one."""
        super().on_response_complete()
        if self._ended and self.cycle.response_complete:
            self.transport.close()

    def _look_again(self) -> None:
        self._looking = self.loop.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        if self.transport.is_closing():
            return
        watched = select.poll()
        watched.register(self.transport.get_extra_info("socket").fileno(), 0)
        # Errors and resets are reported unasked, and of the others none.
        if watched.poll(0):
            self.transport.abort()
        else:
            self._look_again()
