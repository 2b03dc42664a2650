"""The node-local actor, for what a node needs once: LMCache's server and the GPUs' keeper.

One actor a node, made by the first engine there. If it dies, its server dies with it, and Ray
starts both again on the same address; engines recompute meanwhile. It ends itself when no engine
of the application has been heard of for ``ABANDONED_S``.

On several nodes the actors also tell each other of their servers, so that a prefiller's KV
reaches a decoder on another node; see docs/cluster.md.
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
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from conserve.settings import Settings
from conserve.wire import BEAT_S
from deployments.messages import NodeCache
from deployments.node.caches import CacheDirectory, SeenCaches
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
    """Is a node's actor; `NodeClient` makes it one.

    Args:
        address: where the LMCache server listens, in every life of this actor.
        names: which names the application's node actors have; see `NodeNames`.
    """

    def __init__(self, settings: Settings, address: Address, names: "NodeNames") -> None:
        self._settings = settings
        self._address = address
        self._names = names
        self._server: LMCacheServer | None = None
        self._caches = SeenCaches()
        self._starting = asyncio.Lock()
        self._last_beat_s = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        # NVML and the guard of power caps block: one thread of their own.
        self._gpus: GpuKeeper | None = None
        self._gpu_thread = ThreadPoolExecutor(1, "gpus")

    async def prepare(self) -> None:
        """Have the LMCache server started, without waiting for it."""
        await self._ensure_started()

    async def launch(self) -> Address:
        """Have the LMCache server started; returns where it will listen.

        Raises:
            RuntimeError: it cannot be; says why.
        """
        server = await self._ensure_started()
        await server.wait_until_launched()
        return self._address

    async def wait_until_healthy(self) -> None:
        """Return when the LMCache server answers.

        Raises:
            RuntimeError: it does not come up; says why.
        """
        server = await self._ensure_started()
        await server.wait_until_healthy()

    async def beat(self, use: EngineUse | None = None) -> EngineEnergy | None:
        """An engine on this node lives.

        Args:
            use: the GPUs that it runs on; None: it has none, and none is looked at.

        Returns:
            What those GPUs have used for it, if that is known.
        """
        self._last_beat_s = time.monotonic()
        await self._ensure_started()
        if use is None:
            return None
        keeper = self._keeper()
        return await self._on_gpus(lambda: keeper.beat(use, time.monotonic()))

    # --- SM slots, for an engine's workers: see `hetero.sm_slots.SmSlotLedger` --------------------

    async def lease_sm_slots(self, gpu: str, engine_id: str, slots: int) -> SmLease:
        """Lease so many tenths of a GPU's SMs to an engine, for as long as it beats.

        The lease says which: units of the split that `hetero.sm_units` describes.

        Raises:
            NoFreeSms: they are not free.
            UnknownGpu: there is no such GPU here.
        """
        keeper = self._keeper()
        return await self._on_gpus(lambda: keeper.lease(gpu, engine_id, slots, time.monotonic()))

    async def rebind_sm_slots(self, lease_id: int, asked_sms: int) -> SmLease:
        """Change a lease to the smallest slot with at least so many SMs."""
        keeper = self._keeper()
        return await self._on_gpus(lambda: keeper.sm_ledger.rebind(lease_id, asked_sms))

    async def split_sm_slots(
        self, decode_id: int, prefill_id: int, asked_sms: int
    ) -> tuple[SmLease, SmLease]:
        """Move the border between decoding's lease and prefill's."""
        keeper = self._keeper()
        return await self._on_gpus(lambda: keeper.sm_ledger.split(decode_id, prefill_id, asked_sms))

    async def leave(self, engine_id: str) -> None:
        """An engine has ended: its SMs are free at once."""
        keeper = self._gpus
        if keeper is not None:
            await self._on_gpus(lambda: keeper.leave(engine_id))

    async def release_sm_slots(self, lease_id: int) -> SmLease:
        """End a lease."""
        keeper = self._keeper()
        return await self._on_gpus(lambda: keeper.sm_ledger.release(lease_id))

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
                logger.exception("looking after GPUs failed; it is tried again")

    async def _on_gpus(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._gpu_thread, work)

    async def node_cache(self) -> NodeCache | None:
        """How other nodes reach this one's LMCache server; None while it is not up."""
        return self._server.node_cache if self._server else None

    async def status(self) -> dict[str, Any]:
        """The LMCache server's process and restarts, other nodes' servers, and GPUs in use."""
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
        # Not in the constructor: Ray runs that outside of the actor's event loop.
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
                )
                jobs.append(self._server.keep_running())
                loop = asyncio.get_running_loop()
                self._tasks = [loop.create_task(job) for job in jobs]
            return self._server

    async def _follow_caches(self) -> None:
        """Keep up with the LMCache servers of the other nodes."""
        own = ray.get_runtime_context().get_actor_name()
        while True:
            try:
                names = await asyncio.to_thread(self._names.listed)
                others = (name for name in names if name != own)
                await asyncio.gather(*(self._ask_node(name) for name in others))
            except Exception:
                logger.exception("looking for other nodes failed; it is tried again")
            await asyncio.sleep(_CACHES_PERIOD_S)

    async def _ask_node(self, name: str) -> None:
        try:
            actor = await asyncio.to_thread(ray.get_actor, name, namespace="serve")
            cache = await asyncio.wait_for(actor.node_cache.remote(), _CACHE_TIMEOUT_S)
        except (TimeoutError, ValueError, ray.exceptions.RayError):
            # Silent, dying or gone. If it lasts, the server is forgotten.
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
    """How many GPUs this node has, by Ray's account."""
    own = ray.get_runtime_context().get_node_id()
    return float(
        sum(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["NodeID"] == own)
    )


class NodeNames:
    """The names of an application's node actors, by which they find each other."""

    def __init__(self, application: str, settings: Settings) -> None:
        self._prefix = f"conserve:{application}:node:"
        # Other settings of LMCache need another server: an actor never changes its own.
        said = f"{settings.lmcache.model_dump_json()}{settings.nodes}{_chunk_tokens(settings)}"
        self._suffix = ":" + hashlib.sha256(said.encode()).hexdigest()[:8]

    def of(self, node_id: str) -> str:
        """The name of the actor on this node."""
        return f"{self._prefix}{node_id}{self._suffix}"

    def listed(self) -> list[str]:
        """The names of the actors that live, or are restarting. Asks Ray; takes milliseconds."""
        found = ray.util.list_named_actors(all_namespaces=True)
        names = (actor["name"] for actor in found if actor["namespace"] == "serve")
        return [name for name in names if self.includes(name)]

    def includes(self, name: str) -> bool:
        """Whether it names a node actor of this application, with these settings of LMCache."""
        return name.startswith(self._prefix) and name.endswith(self._suffix)


class NodeClient:
    """An engine's end of its node's actor; makes the actor if it is the first."""

    def __init__(self, application: str, settings: Settings) -> None:
        self._settings = settings
        self._node_id = ray.get_runtime_context().get_node_id()
        self._names = NodeNames(application, settings)
        # Kept for the actor's next life; if there is one already, that has its own.
        self._address = choose_address(settings, ray.util.get_node_ip_address())
        self._actor = self._connect()
        # Set when the engine knows its GPUs; before that by one that is to lease SMs of them.
        self.use: EngineUse | None = None
        # What these have used for it, from the last beat.
        self.energy: EngineEnergy | None = None

    def prepare(self) -> None:
        """Have the node's LMCache server start, without waiting, for engines that are to come."""
        self._actor.prepare.remote()

    async def launch(self) -> Address:
        """Have the node's LMCache server started, and see to it that the actor lives on.

        Returns:
            Where the server will listen for this node's engines.
        """
        self._address = await self._actor.launch.remote()
        self.keep_beating()
        return self._address

    @property
    def actor_name(self) -> str:
        """By which the engine's workers find the actor, in the namespace ``serve``."""
        return self._names.of(self._node_id)

    async def leave(self, engine_id: str) -> None:
        """Say that the engine has ended, so that nobody waits for its SMs."""
        self.use = None
        await self._actor.leave.remote(engine_id)

    async def wait_until_healthy(self) -> None:
        """Return when the node's LMCache server answers.

        Raises:
            RuntimeError: it does not come up; says why.
        """
        await self._actor.wait_until_healthy.remote()

    def keep_beating(self) -> None:
        """Beat from now on, from a thread: loading a model blocks the event loop for minutes."""
        threading.Thread(target=self._beat, name="node-beat", daemon=True).start()

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            try:
                beat = self._actor.beat.remote(self.use)
                self.energy = ray.get(beat, timeout=_BEAT_TIMEOUT_S)
            except ray.exceptions.GetTimeoutError:
                logger.warning("the node actor does not answer")
            except ray.exceptions.RayActorError:
                try:
                    self._actor = self._connect()
                except Exception as error:
                    logger.warning("the node actor is down: %s", error)
            except Exception:
                # Without beats caps would be lifted, and the LMCache server would end.
                logger.exception("a beat to the node actor failed")

    def _connect(self) -> Any:
        return (
            ray.remote(NodeService)
            .options(
                name=self._names.of(self._node_id),
                namespace="serve",
                get_if_exists=True,
                lifetime="detached",
                max_restarts=-1,
                max_concurrency=1000,
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(self._node_id, soft=False),
            )
            .remote(self._settings, self._address, self._names)
        )
