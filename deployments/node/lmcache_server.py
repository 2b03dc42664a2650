"""Runs a node's LMCache server, and keeps it up.

On several nodes, a server that lacks KV reads it out of another's memory (LMCache's peer-to-peer
mode, over NIXL; docs/reference/cluster.md).
"""

import asyncio
import contextlib
import ctypes
import errno
import functools
import importlib.util
import json
import logging
import os
import platform
import random
import signal
import socket
import sys
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from conserve.engines import allocator_environment
from conserve.settings import Settings
from conserve.wire import TRANSFER_TIMEOUT_S
from deployments.messages import NodeCache
from deployments.node import lmcache_main
from deployments.node.lmcache_main import HEALTH_PATH, OWN_POOL
from deployments.upstream.forgotten_worker import REAP_TIMEOUT_S
from hetero.host_memory import EVICTED_SHARE, page_bytes

logger = logging.getLogger("conserve.node")

# LMCache's own command, as `lmcache_main` starts it.
SERVER_MODULE = lmcache_main.__name__
_DISK = "deployments.node.disk"
# What pip's nixl-cu12 is imported as.
NIXL = "nixl_cu12"

START_TIMEOUT_S = 120.0
# A predecessor frees its port before this; another program does not.
TAKEN_TIMEOUT_S = 10.0
# The server looks for silent workers four times in `REAP_TIMEOUT_S`.
REAPED_S = REAP_TIMEOUT_S * 1.25
_HEALTH_PERIOD_S = 2.0
_HEALTH_TIMEOUT_S = 5.0
_UNHEALTHY_AFTER = 5
# The system call's number, by architecture; glibc has no function for it.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_LONGEST_BACKOFF_S = 10.0
# A server that does not answer a look-up in this time counts as a miss; engines recompute.
_LOOKUP_TIMEOUT_S = 2.0
# How often servers ask which others there are; they drop one after four rounds without it.
_DIRECTORY_PERIOD_S = 1.0
# The server's threads of each kind, at least.
THREADS = 4
# Above the ports of Ray's workers (10002 to 19999), and below those of outgoing connections (from
# 32768), since a server binds its port many seconds after it was chosen.
_OPEN_PORTS = range(20_000, 32_768)


@dataclass(frozen=True, slots=True)
class Address:
    """A server's address for engines and other nodes; its admin port is on loopback."""

    host: str
    port: int
    http_port: int


def choose_address(settings: Settings, node_ip: str) -> Address:
    """Choose where a node's server listens; a port that is 0 in the settings is any free one."""
    host = node_ip if settings.nodes == "several" else "127.0.0.1"
    wanted = settings.lmcache
    # They may not listen yet, so a probe would find them free.
    taken = {settings.port, wanted.port, wanted.http_port}
    port = wanted.port or free_port(host, taken)
    return Address(host, port, wanted.http_port or free_port("127.0.0.1", taken | {port}))


def free_port(host: str, but: Collection[int] = ()) -> int:
    """Return a free TCP port that is not given out by chance; raises `RuntimeError`."""
    for port in random.sample(_OPEN_PORTS, k=100):
        if port not in but and is_free(host, port):
            return port
    raise RuntimeError(f"no free port on {host} from {_OPEN_PORTS[0]} to {_OPEN_PORTS[-1]}")


def require_nixl() -> None:
    """Raise `RuntimeError` if the library that moves KV between nodes is missing."""
    if importlib.util.find_spec(NIXL) is None:
        raise RuntimeError(
            "KV cannot move between nodes: NIXL is not installed on this one. On every node: "
            "pip install '.[nodes]' in the repository (it needs no GPU); or set nodes=one."
        )


def lmcache_environment() -> dict[str, str]:
    """Return the server's environment, with the engines' prefix hashes, and without telemetry."""
    # Its admin interface shows its environment to all users of this machine.
    return {
        **{name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"},
        **allocator_environment(os.environ),
        "PYTHONHASHSEED": "0",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
        "LMCACHE_LOG_LEVEL": "WARNING",
        "NIXL_LOG_LEVEL": "WARN",
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }


@dataclass(eq=False)
class LMCacheServer:
    """Starts the server, watches it, and restarts it on the same address.

    ``directory_url`` is where it learns of other nodes' servers (None: it shares with none).
    ``gpu`` is whether it copies from and to GPUs, ``gpu_workers`` the most engines' workers on this
    node, and ``disk`` what `deployments.node.disk` is given (None: there is none).
    """

    size_gb: float
    chunk_tokens: int
    address: Address
    directory_url: str | None = None
    gpu: bool = True
    gpu_workers: int = 0
    disk: dict[str, int | str] | None = None
    restarts: int = -1
    _process: asyncio.subprocess.Process | None = None
    _cache: NodeCache | None = None
    _launched: asyncio.Event = field(default_factory=asyncio.Event)
    _healthy: asyncio.Event = field(default_factory=asyncio.Event)
    _problem: str = "it has not been started"
    _started_s: float = 0.0
    # Since when another program has had one of its ports.
    _taken_since_s: float | None = None

    def command(self) -> list[str]:
        """Return the server's command line.

        Without GPUs engines copy, except with several nodes, where KV is sent, as NIXL needs memory
        of another kind.
        """
        command = [
            sys.executable, "-m", SERVER_MODULE, "server",
            "--host", self.address.host,
            "--port", str(self.address.port),
            "--http-host", "127.0.0.1",
            "--http-port", str(self.address.http_port),
            "--l1-size-gb", str(self.size_gb),
            "--eviction-policy", "LRU",
            "--eviction-ratio", str(EVICTED_SHARE),
            "--supported-transfer-mode", "auto",
            "--chunk-size", str(self.chunk_tokens),
            "--max-workers", str(THREADS),
            "--worker-reap-timeout-seconds", str(REAP_TIMEOUT_S),
            "--worker-registration-grace-seconds", str(REAP_TIMEOUT_S),
        ]  # fmt: skip
        if self.gpu:
            # Store layers with a window or a state apart from others.
            command.append("--separate-object-groups")
            # Each thread serves fixed workers; with fewer, copies of one wait for another's.
            command += ["--max-gpu-workers", str(max(THREADS, self.gpu_workers))]
        if self.disk is not None:
            adapter = {"type": "plugin", "module_path": _DISK, "class_name": "DiskTier"}
            command += ["--l2-adapter", json.dumps({**adapter, "adapter_params": self.disk})]
            # What is loaded stays in host memory. By default eight slow loads stop all look-ups.
            command += ["--l2-prefetch-policy", "retain", "--l2-prefetch-max-in-flight", "64"]
        if (cache := self._cache) is None:
            return command if self.gpu else [*command, "--no-l1-use-lazy", "--shm-name", OWN_POOL]
        assert self.directory_url is not None
        return [
            *command,
            "--instance-id", cache.id,
            "--coordinator-url", self.directory_url,
            "--coordinator-advertise-ip", cache.host,
            "--coordinator-heartbeat-interval", str(_DIRECTORY_PERIOD_S),
            "--p2p-advertise-url", f"{cache.host}:{cache.transfer_port}",
            "--p2p-transfer-engine", "nixl",
            "--p2p-lookup-timeout", str(_LOOKUP_TIMEOUT_S),
            "--p2p-load-timeout", str(TRANSFER_TIMEOUT_S),
            "--l1-align-bytes", str(page_bytes(self.size_gb, shared=True)),
        ]  # fmt: skip

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def healthy(self) -> bool:
        return self._healthy.is_set()

    @property
    def node_cache(self) -> NodeCache | None:
        """The running server as other nodes reach it; None while it does not answer."""
        return self._cache if self.healthy else None

    async def wait_until_launched(self) -> None:
        """Return when its process has been started; raises `RuntimeError` if it cannot be."""
        await self._wait(self._launched)

    async def wait_until_healthy(self) -> None:
        """Return when it answers; raises `RuntimeError` if it does not."""
        await self._wait(self._healthy)

    async def _wait(self, event: asyncio.Event) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not event.is_set():
            now_s = time.monotonic()
            if self._taken_since_s is not None and now_s >= self._taken_since_s + TAKEN_TIMEOUT_S:
                raise RuntimeError(
                    f"the LMCache server cannot start: {self._problem}. Stop what listens there, "
                    "or set lmcache.port to another port, or to 0 for ports that are free."
                )
            if now_s >= deadline_s:
                raise RuntimeError(
                    f"the LMCache server did not answer within {START_TIMEOUT_S:g} s: "
                    f"{self._problem}. See the node actor's log."
                )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), 0.5)

    async def keep_running(self) -> None:
        """Start it, and again whenever it ends; never returns."""
        backoff_s = 0.5
        while True:
            own = (self.address.host, self.address.port), ("127.0.0.1", self.address.http_port)
            taken = next((port for host, port in own if not is_free(host, port)), None)
            if taken is not None:
                self._problem = f"port {taken} is in use"
                if self._taken_since_s is None:
                    self._taken_since_s = time.monotonic()
                logger.warning("LMCache server not started: %s", self._problem)
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, _LONGEST_BACKOFF_S)
                continue
            self._taken_since_s = None
            self.restarts += 1
            self._started_s = time.monotonic()
            if self.directory_url:
                # The last port always changes: servers remember another's memory by that address.
                host = self.address.host
                own_id = uuid.uuid4().hex
                self._cache = NodeCache(own_id, host, self.address.port, free_port(host))
            self._process = await asyncio.create_subprocess_exec(
                *self.command(),
                env=lmcache_environment(),
                stdin=asyncio.subprocess.DEVNULL,
                # The access log has a line for every health check.
                stdout=asyncio.subprocess.DEVNULL,
                preexec_fn=functools.partial(_prepare, sockets() if self.gpu else []),
            )
            self._launched.set()
            logger.info("LMCache server started, pid %d", self._process.pid)
            watcher = asyncio.get_running_loop().create_task(self._watch(self._process))
            code = await self._process.wait()
            watcher.cancel()
            self._healthy.clear()
            self._problem = f"it ended with {code}"
            logger.warning("LMCache server ended with %s; restarting", code)
            if time.monotonic() - self._started_s > 60:
                backoff_s = 0.5
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _LONGEST_BACKOFF_S)

    def terminate(self) -> None:
        """End it; it restarts unless `keep_running` is cancelled."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill_hung(self, waited_s: float) -> None:
        """Kill it if it is what an engine has waited for in vain, and not its successor."""
        process, ran_s = self._process, time.monotonic() - self._started_s
        if process is None or process.returncode is not None or ran_s < waited_s:
            return
        logger.error(
            "LMCache server has not answered a load of KV for %.0f s; killing it: engines compute "
            "what they wait for", waited_s,
        )  # fmt: skip
        with contextlib.suppress(ProcessLookupError):
            process.kill()

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
                reader, writer = await asyncio.open_connection("127.0.0.1", self.address.http_port)
                writer.write(f"GET {HEALTH_PATH} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
                status = await reader.readline()
                writer.close()
                return b" 200" in status
        except (OSError, TimeoutError) as error:
            self._problem = f"its health check failed: {error or type(error).__name__}"
            return False


def is_free(host: str, port: int) -> bool:
    """Return whether a process could listen there now."""
    return refused(host, port) is None


def refused(host: str, port: int) -> int | None:
    """Return why this user cannot listen there, as an error's number; None: it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            # That of a name that cannot be resolved is not one of `errno`.
            return error.errno if not isinstance(error, socket.gaierror) else errno.EADDRNOTAVAIL
    return None


def wait_for_server(host: str | None, port: int, timeout_s: float = START_TIMEOUT_S) -> None:
    """Wait for the server, which starts while the engine loads, or raise `RuntimeError`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host or "", port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline_s:
                raise RuntimeError(
                    f"no LMCache server at {host}:{port} after {timeout_s:g} s ({error}); see the "
                    "node actor's log"
                ) from None
        time.sleep(0.1)


def _prepare(nodes: list[int]) -> None:
    """End with the parent, and interleave memory over sockets: GPUs of each socket copy from it."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    interleave(nodes)


def sockets() -> list[int]:
    """Return the NUMA nodes with CPUs; a GPU's memory may be a node, too, and is left out."""
    try:
        said = Path("/sys/devices/system/node/has_cpu").read_text()
    except OSError:
        return []
    parts = (part.partition("-") for part in said.strip().split(",") if part)
    return [node for low, _, high in parts for node in range(int(low), int(high or low) + 1)]


def interleave(nodes: list[int]) -> bool:
    """Interleave this process's memory over NUMA nodes; return whether Linux allows it."""
    call = _SET_MEMPOLICY.get(platform.machine())
    if call is None or not nodes:
        return False
    mpol_interleave = 3
    mask = (ctypes.c_ulong * 16)()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    return bool(ctypes.CDLL(None).syscall(call, mpol_interleave, mask, len(mask) * 64) == 0)
