"""Adds and removes engines; a new table waits for those of its predecessor."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from autoscale.autoscaler import Autoscaler
from conserve.conversations import ConversationTable
from conserve.wire import SILENCE_S, Role
from deployments.messages import EngineInfo, Refusal
from deployments.table import refusals
from deployments.table.accounts import Accounts
from deployments.table.registry import Registry
from deployments.table.room import Room
from deployments.table.running import Listeners, RunningTurns

logger = logging.getLogger("conserve.table")

# How long a new table waits for engines to report before it takes bindings for unknown.
RECOVERY_S = 8.0


@dataclass(eq=False)
class Recovery:
    """A new table's wait for engines; it is over once all are known, or after `RECOVERY_S`.

    Attributes:
        started_s: when the table did, by the monotonic clock.
        complete: set once all engines are known.
        handed_over: whether the next deployment's table has all of this one, which is about to end.
    """

    table: ConversationTable
    registry: Registry
    autoscaler: Autoscaler
    started_s: float
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    handed_over: bool = False
    _expected: frozenset[str] = frozenset()

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_s

    @property
    def is_over(self) -> bool:
        """Whether engines are waited for no longer."""
        return self.complete.is_set() or self.age_s >= RECOVERY_S

    def expects(self, engine_ids: Iterable[str]) -> None:
        """Wait for these and no others: the engines of the deployment before."""
        self._expected |= frozenset(engine_ids)

    def look(self) -> None:
        """End it if as many engines are known as a predecessor wanted, or as will start.

        Turns do not need encoders.
        """
        if self._expected:
            if self._expected <= self.registry.engines.keys():
                self.complete.set()
            return
        wanted = self.autoscaler.wanted
        if all(
            self.registry.living_and_leaving(role)[0] >= wanted[role].scaling.replicas
            for role in wanted
            if role != "encoder"
        ):
            self.complete.set()

    async def not_ready(self) -> Refusal | None:
        """Wait until it is over; return the refusal of turns if there is no decoder then."""
        await self.not_over()
        if not self.complete.is_set():
            left_s = self.started_s + RECOVERY_S - time.monotonic()
            if left_s > 0:
                # Perhaps not all come back: then those that did serve.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.complete.wait(), left_s)
        return None if self.table.decoders else refusals.UNAVAILABLE

    async def not_over(self) -> None:
        """Return unless the next table has all of this one; its callers go there once it ends."""
        if self.handed_over:
            await asyncio.Event().wait()


@dataclass(eq=False)
class Membership:
    """Adds and removes engines, with the turns that they run."""

    table: ConversationTable
    registry: Registry
    accounts: Accounts
    autoscaler: Autoscaler
    recovery: Recovery
    listeners: Listeners
    room: Room
    running: RunningTurns

    def register(self, engine: EngineInfo) -> list[tuple[str, int]]:
        now_s = time.monotonic()
        known = self.registry.engines.get(engine.id)
        if known is not None and engine.registration:
            # It has not heard that it is known; what it has done since is in what it holds.
            self._remove(engine.id)
        forget = self.registry.add(engine, now_s)
        # It has served under a table before this one, which may have had some of it stored.
        self.running.may_be_stored |= bool(engine.holds or engine.parked)
        if engine.wanted_replicas is not None and now_s - self.recovery.started_s <= SILENCE_S:
            # All engines that a predecessor wanted are there.
            self.autoscaler.adopt(engine.role, engine.wanted_replicas, now_s)
        self.accounts.engine_ready(engine)
        self.recovery.look()
        self.room.admit()
        return forget

    def lost(self, engine_id: str, why: str | None = None) -> None:
        """End what an engine runs that is gone; without ``why`` it has left by itself."""
        engine = self.registry.engines.get(engine_id)
        if engine is None:
            return
        self.running.engine_lost(engine_id)
        self.accounts.engine_gone(engine.info, len(self._remove(engine_id)), why)

    def leave(self, engine_id: str, overdue: bool) -> bool:
        engine = self.registry.engines.get(engine_id)
        if engine is None:
            # This is a new table, with which it has not registered yet; or it was lost.
            return not overdue
        if not engine.leaving:
            self.registry.leave(engine)
            logger.info("%s %s is leaving", engine.info.role, engine_id)
        if not self.registry.router_beats_s and self.recovery.age_s > SILENCE_S:
            # Routers belong to a new deployment, with a table of its own: no turn comes here.
            return False
        prefills = False
        if engine.info.role == "prefiller":
            prefills = self.table.prefillers[engine_id].queued_tokens > 0 and not overdue
        if not engine.info.hosts:
            return prefills
        if overdue or self._replaced(engine.info.role) or not self.table.accepting_decoders:
            # With no other decoder the application ends, as a rule. Or the others have died: then
            # turns that run are not cut, and the rest is prefilled again once there is another.
            unbound = self.table.evict(engine_id)
            if unbound:
                logger.info(
                    "%s %s leaves: %d conversations will be prefilled again elsewhere",
                    engine.info.role, engine_id, len(unbound),
                )  # fmt: skip
            self.room.admit()
        return prefills or self.table.decoders[engine_id].conversations > 0

    def _replaced(self, role: Role) -> bool:
        """Return whether a role's engines that leave are too many: others will come for them.

        Then conversations move at once, and also if another model waits for their GPUs. Engines
        that are not needed any more keep theirs a while.
        """
        wanted = self.autoscaler.wanted.get(role)
        living, leaving = self.registry.living_and_leaving(role)
        if wanted is None:
            return False
        return wanted.scaling.given or living - leaving < wanted.scaling.replicas

    def drain(self, engine_id: str) -> int | Refusal | None:
        """Give an engine nothing new, and have its conversations move once they are idle.

        Returns how many it has left; None: there is no such engine.
        """
        engine = self.registry.engines.get(engine_id)
        if engine is None:
            return None
        others = [one for one in self.table.accepting_decoders if one.id != engine_id]
        if engine.info.hosts and not others:
            return refusals.LAST_ENGINE
        if not engine.drained:
            engine.drained = True
            self.registry.leave(engine)
            logger.info("%s %s is drained", engine.info.role, engine_id)
            self.move_drained()
        return self.table.decoders[engine_id].conversations if engine.info.hosts else 0

    def move_drained(self) -> None:
        """Unbind the idle conversations of drained engines; those that run, once they are idle."""
        if not self.table.accepting_decoders:
            return  # The other engines have gone, and these serve what they have.
        unbound = 0
        for engine_id, engine in self.registry.engines.items():
            if engine.drained and engine.info.hosts:
                unbound += len(self.table.evict(engine_id))
        if unbound:
            self.room.admit()

    def left(self, engine_id: str) -> None:
        self.lost(engine_id)

    def _remove(self, engine_id: str) -> list[str]:
        unbound = self.registry.remove(engine_id)
        self.listeners.lost(engine_id)
        return unbound
