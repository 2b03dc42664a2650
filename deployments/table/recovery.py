"""How long a new table waits for the engines of the one before it."""

import asyncio
import contextlib
import time

from autoscale.autoscaler import Autoscaler
from conserve.conversations import ConversationTable
from deployments.messages import Refusal
from deployments.table import refusals
from deployments.table.registry import Registry

# How long a new table waits for engines to report before it takes bindings for unknown.
RECOVERY_S = 8.0


class Recovery:
    """Over once all engines are known, or after `RECOVERY_S`.

    Args:
        started_s: when the table did, by the monotonic clock.

    Attributes:
        started_s: as given.
        complete: set once all engines are known.
    """

    def __init__(
        self,
        table: ConversationTable,
        registry: Registry,
        autoscaler: Autoscaler,
        started_s: float,
    ) -> None:
        self._table = table
        self._registry = registry
        self._autoscaler = autoscaler
        self.started_s = started_s
        self.complete = asyncio.Event()

    @property
    def age_s(self) -> float:
        """How long ago the table started."""
        return time.monotonic() - self.started_s

    @property
    def is_over(self) -> bool:
        """Whether nobody is waited for any more."""
        return self.complete.is_set() or self.age_s >= RECOVERY_S

    def look(self) -> None:
        """See whether all engines are known: those that a predecessor had, else the first ones."""
        wanted = self._autoscaler.wanted
        if all(
            self._registry.living_and_leaving(role)[0] >= wanted[role].scaling.replicas
            for role in wanted
        ):
            self.complete.set()

    async def not_ready(self) -> Refusal | None:
        """Wait until it is over; what turns are told then if there is no decoder."""
        if not self.complete.is_set():
            left_s = self.started_s + RECOVERY_S - time.monotonic()
            if left_s > 0:
                # Perhaps not all come back: then those that did serve.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.complete.wait(), left_s)
        return None if self._table.decoders else refusals.UNAVAILABLE
