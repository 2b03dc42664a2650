"""Tells a node's LMCache server which servers run on other nodes.

In LMCache's peer-to-peer mode, servers ask a *coordinator* process for the servers to read from.
Here each node's actor answers its own server on loopback, with what the other nodes' actors say.

It implements the part of lmcache 0.5.6's coordinator that servers use
(``lmcache.v1.mp_coordinator.http_apis.instances_api``); tests/engines/nodes checks it.
"""

import time
from typing import Any

from aiohttp import web

from deployments.messages import NodeCache

# How long a node's actor may be silent before its server counts as gone.
CACHE_SILENCE_S = 5.0


class SeenCaches:
    """Other nodes' servers, as their actors last described them."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[NodeCache, float]] = {}

    def saw(self, node: str, cache: NodeCache | None, now_s: float) -> None:
        """Note what a node's actor says of its server; None: it is not up."""
        if cache is None:
            self._seen.pop(node, None)
        else:
            self._seen[node] = (cache, now_s)

    def current(self, now_s: float) -> list[NodeCache]:
        """Return the servers whose actors were heard from within `CACHE_SILENCE_S`."""
        for node, (_, seen_s) in list(self._seen.items()):
            if now_s - seen_s > CACHE_SILENCE_S:
                del self._seen[node]
        return [cache for cache, _ in self._seen.values()]


class CacheDirectory:
    """Answers one LMCache server as a coordinator would; a server that asks is alive."""

    def __init__(self, seen: SeenCaches) -> None:
        self._seen = seen
        self._own: dict[str, Any] | None = None
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Listen on loopback; return the server's ``--coordinator-url``."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/instances", self._list),
                web.post("/instances", self._register),
                web.put("/instances/{id}/heartbeat", self._heartbeat),
                web.delete("/instances/{id}", self._deregister),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _list(self, request: web.Request) -> web.Response:
        others = [_described(cache) for cache in self._seen.current(time.monotonic())]
        return web.json_response({"instances": ([] if self._own is None else [self._own]) + others})

    async def _register(self, request: web.Request) -> web.Response:
        body = await request.json()
        again = self._own is not None and self._own["instance_id"] == body["instance_id"]
        self._own = body
        return web.json_response({"instance_id": body["instance_id"], "re_registered": again})

    async def _heartbeat(self, request: web.Request) -> web.Response:
        instance_id = request.match_info["id"]
        if self._own is None or self._own["instance_id"] != instance_id:
            # It then registers again.
            return web.json_response({"error": f"unknown instance {instance_id}"}, status=404)
        return web.json_response({"instance_id": instance_id})

    async def _deregister(self, request: web.Request) -> web.Response:
        if self._own is not None and self._own["instance_id"] == request.match_info["id"]:
            self._own = None
        return web.Response(status=204)


def _described(cache: NodeCache) -> dict[str, Any]:
    return {
        "instance_id": cache.id,
        "ip": cache.host,
        "mq_port": cache.port,
        "p2p_advertised_url": f"{cache.host}:{cache.transfer_port}",
    }
