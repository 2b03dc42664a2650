"""A turn whose conversation is bound nowhere yet."""

import asyncio
from dataclasses import dataclass

from conserve.admission import Admitted


@dataclass(slots=True, eq=False)
class PendingTurn:
    """A turn whose conversation is bound nowhere, until it is bound or given up.

    It is made by `TableService.begin`, or by `place` where that knows nothing of the turn.

    Attributes:
        router_id: the router that asked first; if it dies, the turn is given up.
        claim: tells it from other turns of the conversation, to whoever may give it up.
        settled: done once it is bound or given up; other turns of the conversation wait for that.
        arrived_s: when the conversation's first request came, in Unix time.
        chat: whether it has messages; False: it is a completion's.
        granted: None unless `place` waits for room; done when there is room, cancelled when the
            turn is given up.
        given_up: too late for that: there was room, and nobody wants it any more.
    """

    history_id: str
    router_id: str
    claim: int
    settled: asyncio.Future[None]
    chat: bool = False
    arrived_s: float = 0.0
    granted: asyncio.Future[Admitted] | None = None
    given_up: bool = False

    @property
    def waits(self) -> bool:
        """Whether `place` waits for room: in line, or just out of it and not resumed yet."""
        return self.granted is not None

    @property
    def has_room(self) -> bool:
        """Whether it is bound already, and `place` only has to notice."""
        granted = self.granted
        return granted is not None and granted.done() and not granted.cancelled()

    def settle(self) -> None:
        """Note that the conversation is bound or given up."""
        if not self.settled.done():
            self.settled.set_result(None)
