"""Runs a node's actor, with its LMCache server and the keeper of its GPUs.

The first engine on a node makes the actor; Ray restarts it, with its server, on the same address.
It ends itself when it has heard from no engine for ``ABANDONED_S``.
"""

import asyncio
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import ray
from aiohttp import web

from conserve.settings import Settings
from conserve.wire import BEAT_S
from deployments.detached import USUAL, ActorClient, asks, call, find_or_make, listed
from deployments.messages import NodeCache
from deployments.node.arena import make_arena
from deployments.node.lmcache_server import Address, LMCacheServer, choose_address, require_nixl
from hetero.energy import EngineEnergy
from hetero.gpu_room import most_on_node
from hetero.gpus import EngineUse, GpuKeeper
from hetero.host_memory import chunk_tokens
from hetero.sm_slots import SmLease

logger = logging.getLogger("conserve.node")

_T = TypeVar("_T")

ABANDONED_S = 120.0
_BEAT_TIMEOUT_S = 10.0
_CACHES_PERIOD_S = 1.0
_GPUS_PERIOD_S = 1.0
_CACHE_TIMEOUT_S = 2.0


class NodeService:
    """A node's actor; its LMCache server listens on ``address`` in every life."""

    def __init__(self, settings: Settings, address: Address, names: "NodeNames") -> None:
        self._settings = settings
        self._address = address
        self._names = names
        self._server: LMCacheServer | None = None
        self._caches = SeenCaches()
        # Where this node's engines keep what they have encoded; reserved by the first one.
        self._arena: str | None = None
        self._starting = asyncio.Lock()
        self._last_beat_s = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        # NVML and the guard of power caps block, so they have a thread.
        self._gpus: GpuKeeper | None = None
        self._gpu_thread = ThreadPoolExecutor(1, "gpus")

    async def prepare(self) -> None:
        await self._ensure_started()

    async def launch(self) -> Address:
        """Start the LMCache server and return where it listens; raises `RuntimeError`."""
        server = await self._ensure_started()
        await server.wait_until_launched()
        return self._address

    async def wait_until_healthy(self) -> None:
        """Return when the LMCache server answers; raises `RuntimeError` if it does not."""
        server = await self._ensure_started()
        await server.wait_until_healthy()

    async def arena(self) -> str:
        """Return where engines find the arena of what they have encoded."""
        if self._arena is None:
            self._arena = make_arena(round(self._settings.media.encoded_gb * 1e9))
        return self._arena

    async def beat(self, use: EngineUse | None = None, hangs_s: float = 0.0) -> EngineEnergy | None:
        """Note that an engine lives, and return the energy of the GPUs it uses, if known.

        ``hangs_s`` is how long LMCache's server has not answered it; 0: it does.
        """
        self._last_beat_s = time.monotonic()
        server = await self._ensure_started()
        if hangs_s:
            server.kill_hung(hangs_s)
        if use is None:
            return None
        keeper = self._keeper()
        return await self._on_gpus(lambda: keeper.beat(use, time.monotonic()))

    async def lease_sm_slots(self, gpu: str, engine_id: str, slots: int) -> SmLease:
        """Lease SMs to an engine for as long as it beats; raises `NoFreeSms` or `UnknownGpu`."""
        keeper = self._keeper()
        return await self._on_gpus(lambda: keeper.lease(gpu, engine_id, slots, time.monotonic()))

    async def leave(self, engine_id: str) -> None:
        """Free an ended engine's SMs."""
        keeper = self._gpus
        if keeper is not None:
            await self._on_gpus(lambda: keeper.leave(engine_id))

    def _keeper(self) -> GpuKeeper:
        if self._gpus is None:
            self._gpus = GpuKeeper()
            self._tasks.append(asyncio.get_running_loop().create_task(self._keep_gpus(self._gpus)))
        return self._gpus

    async def _keep_gpus(self, keeper: GpuKeeper) -> None:
        while True:
            await asyncio.sleep(_GPUS_PERIOD_S)
            try:
                await self._on_gpus(lambda: keeper.tick(time.monotonic()))
            except Exception:
                logger.exception("looking after GPUs failed; retrying")

    async def _on_gpus(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._gpu_thread, work)

    async def node_cache(self) -> NodeCache | None:
        """Return how other nodes reach this one's server; None while it is not up."""
        return self._server.node_cache if self._server else None

    async def status(self) -> dict[str, Any]:
        server = self._server
        return {
            "agent_pid": os.getpid(),
            "lmcache_pid": server.pid if server else None,
            "lmcache_healthy": server.healthy if server else False,
            "lmcache_restarts": max(server.restarts, 0) if server else 0,
            "other_caches": [cache.id for cache in self._caches.current(time.monotonic())],
            "gpus": await self._on_gpus(self._gpus.state) if self._gpus else None,
        }

    async def _ensure_started(self) -> LMCacheServer:
        # Ray runs the constructor outside of the actor's event loop, so this cannot be there.
        async with self._starting:
            if self._server is None:
                directory_url = None
                jobs = [self._end_when_abandoned()]
                if self._settings.nodes == "several":
                    require_nixl()
                    directory_url = await CacheDirectory(self._caches).start()
                    jobs.append(self._follow_caches())
                gpu = self._settings.device != "cpu"
                workers = most_on_node(self._settings, _own_gpus()).workers if gpu else 0
                self._server = LMCacheServer(
                    self._settings.lmcache.size_gb,
                    _chunk_tokens(self._settings),
                    self._address,
                    directory_url,
                    gpu,
                    workers,
                    self._settings.lmcache.disk.adapter,
                )
                jobs.append(self._server.keep_running())
                loop = asyncio.get_running_loop()
                self._tasks = [loop.create_task(job) for job in jobs]
            return self._server

    async def _follow_caches(self) -> None:
        own = ray.get_runtime_context().get_actor_name()
        while True:
            try:
                names = await asyncio.to_thread(self._names.listed)
                others = (name for name in names if name != own)
                await asyncio.gather(*(self._ask_node(name) for name in others))
            except Exception:
                logger.exception("looking for other nodes failed; retrying")
            await asyncio.sleep(_CACHES_PERIOD_S)

    async def _ask_node(self, name: str) -> None:
        try:
            actor = await asyncio.to_thread(ray.get_actor, name, namespace="serve")
            asked = call(actor, NodeService.node_cache)
            cache = await asyncio.wait_for(asked, _CACHE_TIMEOUT_S)
        except (TimeoutError, ValueError, ray.exceptions.RayError):
            # The actor is silent, dying or gone. If that lasts, its server is forgotten.
            return
        self._caches.saw(name, cache, time.monotonic())

    async def _end_when_abandoned(self) -> None:
        while (left_s := self._last_beat_s + ABANDONED_S - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left_s)
        logger.info("no engine for %g s: ending", ABANDONED_S)
        if self._server is not None:
            self._server.terminate()
        if self._gpus is not None:
            await self._on_gpus(self._gpus.close)
        ray.kill(ray.get_runtime_context().current_actor)


def _chunk_tokens(settings: Settings) -> int:
    return chunk_tokens(settings, settings.device == "gpu")


def _own_gpus() -> float:
    """Return how many GPUs this node has for Ray."""
    own = ray.get_runtime_context().get_node_id()
    return float(
        sum(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["NodeID"] == own)
    )


class NodeNames:
    """The names of an application's node actors."""

    def __init__(self, application: str, settings: Settings) -> None:
        self._prefix = f"conserve:{application}:node:"
        # Other settings of LMCache need another actor, since one never changes its server.
        said = f"{settings.lmcache.model_dump_json()}{settings.nodes}{_chunk_tokens(settings)}"
        self._suffix = ":" + hashlib.sha256(said.encode()).hexdigest()[:8]

    def of(self, node_id: str) -> str:
        return f"{self._prefix}{node_id}{self._suffix}"

    def listed(self) -> list[str]:
        return [name for name in listed(self._prefix) if self.includes(name)]

    def includes(self, name: str) -> bool:
        return name.startswith(self._prefix) and name.endswith(self._suffix)


class NodeClient(ActorClient):
    """An engine's client of its node's actor, which it starts or finds."""

    def __init__(self, application: str, settings: Settings) -> None:
        self._settings = settings
        self._node_id = ray.get_runtime_context().get_node_id()
        self._names = NodeNames(application, settings)
        # An actor that lives already keeps its own address.
        self._address = choose_address(settings, ray.util.get_node_ip_address())
        # Set once the engine knows its GPUs, or before it leases SMs of them.
        self.use: EngineUse | None = None
        # Energy of its GPUs, from the last beat.
        self.energy: EngineEnergy | None = None
        # Of LMCache's server, since the last beat that told it.
        self._hangs_s = 0.0
        # An engine's workers look for the actor by its name.
        self._connect()

    def prepare(self) -> None:
        self._tell(NodeService.prepare)

    arena = asks(NodeService.arena)
    wait_until_healthy = asks(NodeService.wait_until_healthy)

    async def launch(self) -> Address:
        """Start the node's LMCache server, beat from now on, and return where it listens."""
        self._address = await self._ask(USUAL, NodeService.launch)
        self.keep_beating()
        return self._address

    @property
    def actor_name(self) -> str:
        """The actor's name in Ray's namespace ``serve``."""
        return self._names.of(self._node_id)

    def lmcache_hangs(self, waited_s: float) -> None:
        """Tell the node, with the next beat, that its LMCache server has not answered so long."""
        self._hangs_s = max(self._hangs_s, waited_s)

    async def leave(self, engine_id: str) -> None:
        """Tell the node that the engine has ended, which frees its SMs."""
        self.use = None
        await self._ask(USUAL, NodeService.leave, engine_id)

    def keep_beating(self) -> None:
        """Beat from a thread, since loading a model blocks the event loop for minutes."""
        threading.Thread(target=self._beat, name="node-beat", daemon=True).start()

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            try:
                hangs_s, self._hangs_s = self._hangs_s, 0.0
                beat = call(self._connect(), NodeService.beat, self.use, hangs_s)
                self.energy = ray.get(beat, timeout=_BEAT_TIMEOUT_S)
            except ray.exceptions.GetTimeoutError:
                logger.warning("the node actor does not answer")
            except ray.exceptions.RayActorError as error:
                logger.warning("the node actor is down: %s", error)
                self._actor = None
            except Exception:
                # Keep beating, or caps would be lifted and the LMCache server would end.
                logger.exception("a beat to the node actor failed")

    def _unavailable(self, why: str) -> Exception:
        return RuntimeError(f"the node's actor {why}")

    def _connect(self) -> Any:
        # The thread that beats may drop the actor meanwhile.
        actor = self._actor
        if actor is None:
            actor = self._actor = find_or_make(
                NodeService, self.actor_name, self._settings, self._address, self._names,
                node_id=self._node_id,
            )  # fmt: skip
        return actor


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
    """Answers one LMCache server as LMCache's coordinator would; a server that asks is alive.

    In its peer-to-peer mode a server asks a coordinator which servers it may read from. This has
    the part of lmcache 0.5.6's that servers use (``mp_coordinator.http_apis.instances_api``).
    """

    def __init__(self, seen: SeenCaches) -> None:
        self._seen = seen
        self._own: dict[str, Any] | None = None

    async def start(self) -> str:
        """Listen on loopback; return the server's ``--coordinator-url``."""
        app = web.Application()
        app.router.add_get("/instances", self._list)
        app.router.add_post("/instances", self._register)
        app.router.add_put("/instances/{id}/heartbeat", self._heartbeat)
        app.router.add_delete("/instances/{id}", self._deregister)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        return f"http://{host}:{port}"

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
