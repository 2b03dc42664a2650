"""The router: ConServe's front door.

Each replica listens for itself, on the port in the settings, and passes an engine's bytes on as
they come, unread. Measured on two cores with 8 clients, a warm turn of 64 tokens takes 1.05
times as long through it as without it, and 1.5 times through Serve's own proxy; see
docs/benchmarks.md.
"""

import asyncio
import contextlib
import logging
import os
import socket

import uvicorn
from ray import serve
from ray.serve.handle import DeploymentHandle

from conserve.settings import Settings
from conserve.wire import BEAT_S
from deployments.environments.client import EnvironmentClient
from deployments.loopback import listen_where_ray_does
from deployments.messages import HEAD_NODE
from deployments.node.node import NodeClient
from deployments.router.connection import Connection
from deployments.router.frontdoor import FrontDoor
from deployments.table.table_client import TableClient, TableUnavailable
from deployments.threads import give_way_soon

logger = logging.getLogger("ray.serve")


@serve.deployment(
    # On the head node, whose address clients know; Ray gives every head this resource.
    ray_actor_options={"num_cpus": 0, "resources": {HEAD_NODE: 0.001}},
    health_check_period_s=2,
    health_check_timeout_s=30,
    graceful_shutdown_timeout_s=5,
)
class Router:
    """Listens, and beats so that the conversation table knows that the application lives.

    The handles are not called: they make the engines part of this application.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it.
        self, settings: Settings, *engines: DeploymentHandle
    ) -> None:
        context = serve.get_replica_context()
        listen_where_ray_does()
        give_way_soon()
        self._handles = engines
        self._table = TableClient(context.app_name, settings)
        self._id = context.replica_id.unique_id
        self._environments = (
            EnvironmentClient(context.app_name, settings) if settings.environments.enabled else None
        )
        if settings.nodes == "one":
            # LMCache's server comes up while engines load. If it does not, engines say so; a router
            # that starts again serves without it.
            NodeClient(context.app_name, settings).prepare()
        self._door = FrontDoor(settings, self._table, self._id, self._environments)
        listener = _listen(settings)
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._door,
                http=Connection,
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_keep_alive=75,
                timeout_graceful_shutdown=5,
                server_header=False,
            )
        )
        # Signals are for the replica's own process to handle.
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        loop = asyncio.get_running_loop()
        self._serving = loop.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise RuntimeError("the router's HTTP server ended while it started")
            await asyncio.sleep(0.01)
        logger.info("router %d listens on http://%s:%d", os.getpid(), settings.host, settings.port)
        self._beating = loop.create_task(self._beat())

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        if self._serving.done():
            raise RuntimeError("the router's HTTP server has ended")
        if self._beating.done():
            raise RuntimeError("the router's beats to the conversation table have ended")

    async def _beat(self) -> None:
        while True:
            try:
                if self._environments is not None:
                    self._environments.beat()
                await self._table.router_beat(self._id)
            except TableUnavailable as error:
                logger.warning("router: %s", error)
            except Exception:
                logger.exception("router: a beat failed")
            await asyncio.sleep(BEAT_S)


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if settings.routers > 1:
        # They share the port of a node; the kernel spreads connections over them.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise RuntimeError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}. Set another "
            "`port`; if Serve's own proxy has it, set `proxy_location: Disabled`."
        ) from None
    return listener
