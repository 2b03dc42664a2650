"""Runs the manager of tool environments as an actor on the head node.

If it is killed, Ray starts it again: launchers end their commands, and environments are in the
journal. Every second it asks the conversation table which conversations have ended. When it has
heard from no router for `ABANDONED_S`, it removes all environments and ends itself.
"""

import asyncio
import contextlib
import fcntl
import inspect
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from conserve.clock import unix_s
from conserve.environments import Ledger, Quotas
from conserve.environments.journal import Journal, JournalError
from conserve.environments.pressure import HostPressure, cpu_pressure
from conserve.errors import ApiError
from conserve.settings import Settings
from conserve.wire import BEAT_S
from deployments.environments.backends import Backend, Containers, Processes, find_engine
from deployments.environments.manager import Manager
from deployments.environments.sandbox import SandboxError, namespaces_missing
from deployments.messages import Refusal
from deployments.table_client import TableClient, TableUnavailable

logger = logging.getLogger("conserve.environments")

ABANDONED_S = 120.0
# How long an environment is kept whose conversation has not begun: twice as long as one may wait
# for room by default, so that its client may try again.
UNCLAIMED_S = 120.0
JOURNAL, LOCK = "journal", "lock"
# How long a request waits for this process to recover its predecessor's environments.
_START_S = 15.0


class EnvironmentService:
    """Manages environments as an actor; answers a `Refusal` instead of raising an error."""

    def __init__(self, settings: Settings, application: str, deployment: str) -> None:
        self._settings = settings.environments
        self._root = settings.environments.folder(settings.port)
        self._table = TableClient(application, deployment, settings)
        self._last_beat_s = time.monotonic()
        self._manager: Manager | None = None
        self._ledger: Ledger | None = None
        self._journal: Journal | None = None
        self._lock: int | None = None
        self._problem = "it is being started"
        self._ready = asyncio.Event()
        self._housekeeping: asyncio.Task[None] | None = None
        self._runs: dict[str, asyncio.Task[Any]] = {}

    async def beat(self) -> None:
        self._last_beat_s = time.monotonic()
        # Not in the constructor: Ray runs that outside of the actor's event loop.
        if self._housekeeping is None or self._housekeeping.done():
            self._housekeeping = asyncio.get_running_loop().create_task(self._keep_house())

    async def declare(self, conversation_id: str, body: Any) -> Any:
        return await self._answer(lambda manager: manager.declare(conversation_id, body))

    async def listed(self, conversation_id: str) -> Any:
        return await self._answer(lambda manager: manager.listed(conversation_id))

    async def shown(self, conversation_id: str, name: str) -> Any:
        return await self._answer(lambda manager: manager.shown(conversation_id, name))

    async def let_go(self, conversation_id: str, name: str) -> Any:
        return await self._answer(lambda manager: manager.let_go(conversation_id, name))

    async def run(self, run_id: str, conversation_id: str, name: str, body: Any) -> Any:
        """Run a command, which `cut` ends by its ``run_id``."""
        task = asyncio.current_task()
        assert task is not None
        self._runs[run_id] = task
        try:
            return await self._answer(lambda manager: manager.run(conversation_id, name, body))
        except asyncio.CancelledError:
            return Refusal(499, "the client has left", "cancelled")
        finally:
            del self._runs[run_id]

    async def cut(self, run_id: str) -> None:
        if (task := self._runs.get(run_id)) is not None:
            task.cancel()

    async def _answer(self, asked: Callable[[Manager], Any]) -> Any:
        await self.beat()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ready.wait(), _START_S)
        if self._manager is None:
            return Refusal(
                503, f"environments are not available yet: {self._problem}", "unavailable", 5
            )
        try:
            answer = asked(self._manager)
            return await answer if inspect.isawaitable(answer) else answer
        except ApiError as error:
            return Refusal(error.status, error.message, error.code or "", error.retry_after_s)
        except OSError as error:
            logger.exception("the journal cannot be written")
            return Refusal(
                503, f"the head node cannot write its journal: {error.strerror}", "unavailable", 30
            )

    # --- housekeeping ------------------------------------------------------------------------

    async def _keep_house(self) -> None:
        while True:
            try:
                if self._manager is None:
                    await self._start()
                else:
                    await self._tidy(self._manager)
            except (OSError, JournalError, SandboxError) as error:
                self._problem = str(error)
                logger.warning("environments: %s", error)
            except Exception as error:
                self._problem = f"{type(error).__name__}; see the log"
                logger.exception("housekeeping failed; it goes on")
            await asyncio.sleep(BEAT_S)

    async def _start(self) -> None:
        """Take over the folder; raises `OSError` or `JournalError`."""
        make_root(self._root)
        if self._journal is None:
            # This process holds the lock until it ends.
            if self._lock is None:
                self._lock = take_lock(self._root)
            self._journal = Journal(self._root / JOURNAL)
        settings = self._settings
        quotas = Quotas(settings.most, settings.most_of_tenant, UNCLAIMED_S)
        ledger = Ledger(quotas, self._journal.add)
        ledger.recover(self._journal.found, unix_s())
        self._journal.rewrite(ledger.snapshot())
        self._journal.found = ledger.snapshot()
        backends = await asyncio.to_thread(self._backends)
        manager = Manager(settings, ledger, backends, self._table.note)
        await manager.tidy()
        self._ledger, self._manager = ledger, manager
        self._ready.set()
        logger.info("%d environments in %s", len(ledger), self._root)

    def _backends(self) -> dict[str, Backend | str]:
        missing = namespaces_missing(self._root)
        backends: dict[str, Backend | str] = {}
        if missing is None or self._settings.isolation == "limits":
            backends["process"] = Processes(self._root, self._settings, namespaces=missing is None)
        else:
            backends["process"] = (
                f"commands cannot be kept apart from the rest of the head node ({missing}); have "
                "the setting environments.isolation say `limits` if those do"
            )
        try:
            backends["container"] = Containers(find_engine(), self._root, self._settings)
        except SandboxError as error:
            backends["container"] = str(error)
        return backends

    async def _tidy(self, manager: Manager) -> None:
        assert self._ledger is not None
        assert self._journal is not None
        asked = list(self._ledger.conversations())
        pressure = HostPressure(manager.running, _cpu_pressure())
        try:
            seen = await self._table.lifecycle(asked, pressure)
            if seen.standings is not None:
                # `asked` leaves out conversations that came meanwhile.
                self._ledger.observe(seen.table, seen.standings, unix_s(), asked)
        except TableUnavailable:
            pass  # Without the table, no conversation counts as ended.
        manager.step()
        if self._journal.is_long:
            self._journal.rewrite(self._ledger.snapshot())
        if time.monotonic() - self._last_beat_s > ABANDONED_S:
            logger.info("no router for %g s: removing all environments, and ending", ABANDONED_S)
            await manager.close()
            ray.kill(ray.get_runtime_context().current_actor)


def make_root(root: Path) -> None:
    """Make environments' folder; raises `OSError` unless only this user can write there."""
    root.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    root.mkdir(mode=0o711, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError(f"{root} is not a folder of this user's; set environments.root")
    # Commands with users of their own have to pass through.
    root.chmod(0o711)
    above = root.parent.lstat()
    if above.st_uid not in (0, os.geteuid()) or (
        above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX
    ):
        raise OSError(f"others may replace {root}; set environments.root to another folder")


def take_lock(root: Path) -> int:
    """Become the only manager of these environments; raises `OSError` if there is another."""
    file = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise OSError(
            f"another application manages {root}, or did until a moment ago; where it has other "
            "settings, it ends two minutes after its routers, or set environments.root"
        ) from None
    return file


def _cpu_pressure() -> float:
    try:
        stalls = Path("/proc/pressure/cpu").read_text()
    except OSError:
        stalls = None
    return cpu_pressure(stalls, os.getloadavg()[0], os.cpu_count() or 1)
