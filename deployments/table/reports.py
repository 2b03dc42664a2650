"""Takes decoders' reports of the turns that they have begun by themselves, and of ended ones."""

import logging

from conserve.clock import unix_s
from conserve.conversations import ConversationTable
from conserve.direct import Began, Ended, Notice, Report
from deployments.messages import TurnPlan
from deployments.table.listeners import Listeners
from deployments.table.registry import Registry
from deployments.table.running import RunningTurns

logger = logging.getLogger("conserve.table")


class Reports:
    """Takes decoders' reports, each once and in order."""

    def __init__(
        self,
        table: ConversationTable,
        registry: Registry,
        listeners: Listeners,
        running: RunningTurns,
    ) -> None:
        self._table = table
        self._registry = registry
        self._listeners = listeners
        self._running = running

    async def hear(self, decoder_id: str, registration: int, heard: int) -> Notice | None:
        """See `TableService.hear`."""
        notice = await self._listeners.hear(decoder_id, registration, heard)
        return None if notice is None else notice._replace(parks=self._parks_on(decoder_id))

    def take(self, decoder_id: str, registration: int, report: Report) -> bool | None:
        """See `TableService.report`."""
        notices = self._table.notices
        if not notices.is_current(decoder_id, registration):
            return None
        for event in report.events if notices.is_new(decoder_id, report.number) else ():
            try:
                self._happened(event, decoder_id)
            except Exception:
                # It would be told again for ever, and nothing after it.
                logger.exception("what decoder %s says of %s", decoder_id, event.turn)
        self._listeners.confirmed(decoder_id, report.heard)
        return self._parks_on(decoder_id)

    def _parks_on(self, decoder_id: str) -> bool:
        memory = self._table.memory
        return memory is not None and memory.parks_on(decoder_id)

    def _happened(self, event: Began | Ended, decoder_id: str) -> None:
        turn = event.turn
        if isinstance(event, Began):
            if self._table.began(turn, decoder_id, unix_s(), event.parks):
                url = self._registry.engines[decoder_id].url
                plan = TurnPlan(turn, decoder_id, url, later=True, parks=event.parks)
                self._listeners.began(turn, decoder_id)
                self._running.begins(plan, event.router_id)
            return
        self._listeners.ended(turn, decoder_id)
        if not event.completed or event.stats is None:
            self._running.abandon(turn, decoder_id, event.stats)
        elif not self._running.advance(turn, decoder_id, event.stats, event.tails):
            # Ended or moved meanwhile: a table rebuilt from holdings must not revive it.
            self._registry.note_forgotten(decoder_id, turn.history_id, turn.incarnation)
