"""A turn whose conversation is bound nowhere yet."""

import asyncio
from dataclasses import dataclass

from conserve.admission import Admitted


@dataclass(slots=True, eq=False)
class PendingTurn:
    """A turn from `TableService.begin`, which found its conversation unbound, to the binding.

    Attributes:
        router_id: the router that asked; if it dies, nobody wants the turn placed.
        settled: done once it is bound or given up; other turns of the conversation wait for that.
        arrived_s: when the conversation's first request came, in Unix time.
        granted: None unless it waits in line; done when it is bound, cancelled when given up.
    """

    conversation_id: str
    router_id: str
    settled: asyncio.Future[None]
    arrived_s: float = 0.0
    granted: asyncio.Future[Admitted] | None = None

    @property
    def waits(self) -> bool:
        """Whether it is in line, or has been told so recently that it does not know better."""
        return self.granted is not None

    def settle(self) -> None:
        """Note that the conversation is bound or given up."""
        if not self.settled.done():
            self.settled.set_result(None)
