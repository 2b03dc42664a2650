"""The node-local actor: starts, watches and restarts what a node needs once, the LMCache server.

One actor a node, made by the first engine there. If it dies, its server dies with it, and Ray
starts both again on the same port; engines recompute meanwhile. It ends itself when no engine
of the application has been heard of for ``ABANDONED_S``.
"""

import asyncio
import contextlib
import ctypes
import hashlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from conserve.settings import Settings

logger = logging.getLogger("conserve.node")

START_TIMEOUT_S = 120.0
ABANDONED_S = 120.0
_HEALTH_PERIOD_S = 2.0
_HEALTH_TIMEOUT_S = 5.0
_UNHEALTHY_AFTER = 5
_LONGEST_BACKOFF_S = 10.0
_BEAT_S = 1.0
_BEAT_TIMEOUT_S = 10.0


class NodeService:
    """What the actor does; `NodeClient` makes it one."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._healthy = asyncio.Event()
        self._restarts = -1
        self._problem = "it has not been started"
        self._last_beat_s = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Have the LMCache server up; returns when it answers.

        Raises:
            RuntimeError: it does not come up; says why.
        """
        self._ensure_tasks()
        try:
            await asyncio.wait_for(self._healthy.wait(), START_TIMEOUT_S)
        except TimeoutError:
            raise RuntimeError(
                f"the LMCache server did not answer within {START_TIMEOUT_S:g} s: {self._problem}. "
                "See the node actor's log; lmcache.port and lmcache.http_port must be free on "
                "every node."
            ) from None

    async def beat(self) -> None:
        """An engine on this node lives."""
        self._ensure_tasks()
        self._last_beat_s = time.monotonic()

    async def status(self) -> dict[str, Any]:
        """The LMCache server's process, and how often it was restarted."""
        return {
            "agent_pid": os.getpid(),
            "lmcache_pid": self._process.pid if self._process else None,
            "lmcache_healthy": self._healthy.is_set(),
            "lmcache_restarts": max(self._restarts, 0),
        }

    def _ensure_tasks(self) -> None:
        if not self._tasks:
            loop = asyncio.get_running_loop()
            self._tasks = [
                loop.create_task(self._keep_running()),
                loop.create_task(self._end_when_abandoned()),
            ]

    async def _keep_running(self) -> None:
        backoff_s = 0.5
        while True:
            taken = _taken_port(self._settings)
            if taken is not None:
                self._problem = f"port {taken} on 127.0.0.1 is in use"
                logger.warning("LMCache server not started: %s", self._problem)
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, _LONGEST_BACKOFF_S)
                continue
            self._restarts += 1
            started_s = time.monotonic()
            self._process = await asyncio.create_subprocess_exec(
                *lmcache_command(self._settings),
                env=lmcache_environment(),
                stdin=asyncio.subprocess.DEVNULL,
                # Its access log, a line for every health check.
                stdout=asyncio.subprocess.DEVNULL,
                preexec_fn=_die_with_parent,
            )
            logger.info("LMCache server started, pid %d", self._process.pid)
            watcher = asyncio.get_running_loop().create_task(self._watch(self._process))
            code = await self._process.wait()
            watcher.cancel()
            self._healthy.clear()
            self._problem = f"it ended with {code}"
            logger.warning("LMCache server ended with %s; restarting", code)
            if time.monotonic() - started_s > 60:
                backoff_s = 0.5
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _LONGEST_BACKOFF_S)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        failures = 0
        while True:
            if await self._answers():
                failures = 0
                self._healthy.set()
            else:
                failures += 1
                if self._healthy.is_set() and failures >= _UNHEALTHY_AFTER:
                    logger.warning("LMCache server does not answer; killing it")
                    process.kill()
                    return
            await asyncio.sleep(_HEALTH_PERIOD_S if self._healthy.is_set() else 0.25)

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", self._settings.lmcache.http_port
                )
                writer.write(b"GET /healthcheck HTTP/1.0\r\nHost: localhost\r\n\r\n")
                status = await reader.readline()
                writer.close()
                return b" 200" in status
        except (OSError, TimeoutError) as error:
            self._problem = f"its health check failed: {error or type(error).__name__}"
            return False

    async def _end_when_abandoned(self) -> None:
        while (left_s := self._last_beat_s + ABANDONED_S - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left_s)
        logger.info("no engine for %g s: ending", ABANDONED_S)
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        ray.kill(ray.get_runtime_context().current_actor)


def lmcache_command(settings: Settings) -> list[str]:
    """The LMCache server's command line: every socket on loopback."""
    lmcache = settings.lmcache
    return [
        sys.executable, "-m", "lmcache.cli.main", "server",
        "--host", "127.0.0.1",
        "--port", str(lmcache.port),
        "--http-host", "127.0.0.1",
        "--http-port", str(lmcache.http_port),
        "--l1-size-gb", str(lmcache.size_gb),
        "--eviction-policy", "LRU",
        "--supported-transfer-mode", "auto",
        "--chunk-size", str(lmcache.chunk_tokens),
        "--max-workers", "4",
    ]  # fmt: skip


def lmcache_environment() -> dict[str, str]:
    """The server's environment: the same prefix hashes as the engines', and no reports home."""
    return {
        **os.environ,
        "PYTHONHASHSEED": "0",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
        "LMCACHE_LOG_LEVEL": "WARNING",
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }


def _taken_port(settings: Settings) -> int | None:
    """A port that the server needs and another has, whose health would be taken for ours."""
    for port in (settings.lmcache.port, settings.lmcache.http_port):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return port
    return None


def _die_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


class NodeClient:
    """An engine's end of its node's actor; makes the actor if it is the first."""

    def __init__(self, application: str, settings: Settings) -> None:
        self._settings = settings
        self._node_id = ray.get_runtime_context().get_node_id()
        # Other settings of LMCache need another server: an actor never changes its own.
        digest = hashlib.sha256(settings.lmcache.model_dump_json().encode()).hexdigest()[:8]
        self._name = f"conserve:{application}:node:{self._node_id}:{digest}"
        self._actor = self._connect()

    async def start(self) -> None:
        """Wait until the node's LMCache server answers, and see to it that the actor lives on.

        Its beats come from a thread of their own: loading a model blocks the event loop for
        minutes.
        """
        await self._actor.start.remote()
        threading.Thread(target=self._beat, name="node-beat", daemon=True).start()

    def _beat(self) -> None:
        while True:
            time.sleep(_BEAT_S)
            try:
                ray.get(self._actor.beat.remote(), timeout=_BEAT_TIMEOUT_S)
            except ray.exceptions.GetTimeoutError:
                logger.warning("the node actor does not answer")
            except ray.exceptions.RayActorError:
                try:
                    self._actor = self._connect()
                except ray.exceptions.RayError as error:
                    logger.warning("the node actor is down: %s", error)

    def _connect(self) -> Any:
        return (
            ray.remote(NodeService)
            .options(
                name=self._name,
                namespace="serve",
                get_if_exists=True,
                lifetime="detached",
                max_restarts=-1,
                max_concurrency=1000,
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(self._node_id, soft=False),
            )
            .remote(self._settings)
        )
