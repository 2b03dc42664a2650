"""Talks with decoders that begin turns by themselves (`conserve.direct`)."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from conserve.clock import unix_s
from conserve.conversations import ConversationTable
from conserve.direct import LEASE_S, Began, Ended, Notice, Report
from conserve.turn import TurnKey
from conserve.wire import BEAT_S, SILENCE_S
from deployments.messages import TurnPlan
from deployments.table.registry import Registry
from deployments.table.running import RunningTurns

logger = logging.getLogger("conserve.table")

# How long to wait for decoders to say what they have done. To list or end conversations, or to
# begin a turn beside another: as long as a decoder may begin turns. To move a conversation: as long
# as a decoder may be silent.
LOOK_S, MOVE_S = LEASE_S, SILENCE_S


@dataclass(eq=False)
class Listeners:
    """Tells decoders what they may no longer begin, and takes each of their reports once."""

    table: ConversationTable
    registry: Registry
    running: RunningTurns
    _news: dict[str, asyncio.Event] = field(default_factory=dict)
    _waiting: set[tuple[str, int, asyncio.Future[None]]] = field(default_factory=set)
    # Turns that decoders have begun. Of a lost one's, only this knows.
    _begun: defaultdict[str, set[TurnKey]] = field(default_factory=lambda: defaultdict(set))

    def __post_init__(self) -> None:
        self._notices = self.table.notices
        self._notices.tell = self._has_news

    async def hear(self, decoder_id: str, registration: int, heard: int) -> Notice | None:
        """Return what is new for a decoder, at once or within a beat; None: it has to register."""
        if not self._notices.is_current(decoder_id, registration):
            return None
        news = self._news.setdefault(decoder_id, asyncio.Event())
        due = self._notices.due(decoder_id, heard)
        if due is not None and due.number <= heard:
            news.clear()
            waiting = asyncio.ensure_future(news.wait())
            try:
                await asyncio.wait([waiting], timeout=BEAT_S)
            finally:
                waiting.cancel()
            current = self._notices.is_current(decoder_id, registration)
            due = self._notices.due(decoder_id, heard) if current else None
        return None if due is None else due._replace(parks=self._parks_on(decoder_id))

    async def have_heard(self, decoder_ids: Collection[str], patience_s: float) -> bool:
        """Wait until all that these have done, or were told, until now is known; returns if so."""
        loop = asyncio.get_running_loop()
        asked = {decoder_id: self._notices.probe(decoder_id) for decoder_id in decoder_ids}
        waiting: list[tuple[str, int, asyncio.Future[None]]] = [
            (decoder_id, number, loop.create_future())
            for decoder_id, number in asked.items()
            if not self._notices.has_heard(decoder_id, number)
        ]
        if not waiting:
            return True
        self._waiting.update(waiting)
        try:
            _, left = await asyncio.wait([one[2] for one in waiting], timeout=patience_s)
        finally:
            self._waiting.difference_update(waiting)
        return not left

    def report(self, decoder_id: str, registration: int, report: Report) -> bool | None:
        """Take a report; returns what `Table.report` does."""
        if not self._notices.is_current(decoder_id, registration):
            return None
        for event in report.events if self._notices.is_new(decoder_id, report.number) else ():
            try:
                self._happened(event, decoder_id)
            except Exception:
                # It would be told again for ever, and nothing after it.
                logger.exception("what decoder %s says of %s", decoder_id, event.turn)
        self._notices.confirm(decoder_id, report.heard)
        self._have_heard()
        return self._parks_on(decoder_id)

    def lost(self, decoder_id: str) -> None:
        """End the turns that a lost decoder had begun by itself."""
        for turn in self._begun.pop(decoder_id, set()):
            self.running.ends(turn, None)

    def _happened(self, event: Began | Ended, decoder_id: str) -> None:
        turn = event.turn
        if isinstance(event, Began):
            if self.table.began(turn, decoder_id, unix_s(), event.parks):
                url = self.registry.engines[decoder_id].url
                plan = TurnPlan(turn, decoder_id, url, later=True, parks=event.parks)
                self._begun[decoder_id].add(turn)
                self.running.begins(plan, event.router_id)
            return
        self._begun[decoder_id].discard(turn)
        if not event.completed or event.stats is None:
            self.running.abandon(turn, decoder_id, event.stats)
        elif not self.running.advance(turn, decoder_id, event.stats, event.tails):
            # Ended or moved meanwhile: a table rebuilt from holdings must not revive it.
            self.registry.note_forgotten(decoder_id, turn.history_id, turn.incarnation)

    def _parks_on(self, decoder_id: str) -> bool:
        memory = self.table.memory
        return memory is not None and memory.parks_on(decoder_id)

    def _has_news(self, decoder_id: str) -> None:
        if decoder_id in self._news:
            self._news[decoder_id].set()
        if decoder_id not in self._notices.decoders:
            self._news.pop(decoder_id, None)
            self._have_heard()

    def _have_heard(self) -> None:
        for decoder_id, number, future in self._waiting:
            if not future.done() and self._notices.has_heard(decoder_id, number):
                future.set_result(None)
