"""Runs the manager of tool environments as an actor on the head node.

If it is killed, Ray starts it again: launchers end their commands, and environments are in the
journal. Every second it asks the conversation table which conversations have ended. When it has
heard from no router for `ABANDONED_S`, it removes all environments and ends itself.
"""

import asyncio
import contextlib
import inspect
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from conserve.clock import unix_s
from conserve.errors import ApiError
from conserve.settings import Settings
from conserve.wire import BEAT_S
from conserve_tools.backends import Backend, Containers, Processes, find_engine
from conserve_tools.journal import Journal, JournalError
from conserve_tools.ledger import Ledger, Quotas
from conserve_tools.manager import Manager
from conserve_tools.root import JOURNAL, folder_of, make_root, take_lock
from conserve_tools.sandbox import SandboxError, namespaces_missing
from deployments.messages import HostPressure, Refusal
from deployments.table_client import TableUnavailable
from deployments.tables import tables_of

logger = logging.getLogger("conserve.environments")

ABANDONED_S = 120.0
# How long an environment is kept whose conversation has not begun: twice as long as one may wait
# for room by default, so that its client may try again.
UNCLAIMED_S = 120.0
# How long a request waits for this process to recover its predecessor's environments.
_START_S = 15.0


class EnvironmentService:
    """Manages environments as an actor; answers a `Refusal` instead of raising an error."""

    def __init__(self, settings: Settings, application: str, deployment: str) -> None:
        self._settings = settings.environments
        self._root = folder_of(settings)
        self._table = tables_of(application, deployment, settings)
        self._last_beat_s = time.monotonic()
        self._manager: Manager | None = None
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
        # One tenant has at most a quarter, so that others have some.
        quotas = Quotas(settings.most, max(1, settings.most // 4), UNCLAIMED_S)
        ledger = Ledger(quotas, self._journal.add)
        ledger.recover(self._journal.found, unix_s())
        self._journal.found = ledger.snapshot()
        self._journal.rewrite(self._journal.found)
        backends = await asyncio.to_thread(self._backends)
        manager = Manager(settings, ledger, backends, self._table.note)
        await manager.tidy()
        self._manager = manager
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
        assert self._journal is not None
        ledger = manager.ledger
        asked = list(ledger.conversations())
        try:
            seen = await self._table.lifecycle(asked, observe(manager.running))
            if seen.standings is not None:
                # `asked` leaves out conversations that came meanwhile.
                ledger.observe(seen.table, seen.standings, unix_s(), asked)
        except TableUnavailable:
            pass  # Without the table, no conversation counts as ended.
        manager.step()
        if self._journal.is_long:
            self._journal.rewrite(ledger.snapshot())
        if time.monotonic() - self._last_beat_s > ABANDONED_S:
            logger.info("no router for %g s: removing all environments, and ending", ABANDONED_S)
            await manager.close()
            ray.kill(ray.get_runtime_context().current_actor)


def observe(running_tools: int) -> HostPressure:
    """Return the load of this machine, on which this number of tools runs."""
    try:
        stalls = Path("/proc/pressure/cpu").read_text()
    except OSError:
        stalls = ""  # Linux has none here.
    return HostPressure(
        running_tools, cpu_pressure(stalls, os.getloadavg()[0], os.cpu_count() or 1)
    )


def cpu_pressure(stalls: str, load: float, cores: int) -> float:
    """Return the share of time in which a process waits for a CPU.

    Args:
        stalls: the text of ``/proc/pressure/cpu``; empty if Linux has none here.
        load: how many processes ran or waited on average, used in its place.
    """
    found = re.search(r"^some avg10=([\d.]+)", stalls, re.MULTILINE)
    if found is not None:
        return min(1.0, float(found[1]) / 100)
    return max(0.0, 1 - cores / load) if load > 0 else 0.0
