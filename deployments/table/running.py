"""Keeps the turns under way, those that decoders begin by themselves (`conserve.direct`) too."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from conserve import direct
from conserve.clock import unix_s
from conserve.conversations import ConversationTable
from conserve.histories.prefixes import mark
from conserve.history import History
from conserve.placement import Coming
from conserve.recognition import Chain, Digest
from conserve.settings import Settings
from conserve.turn import Reason, TurnKey, TurnStats
from conserve.wire import BEAT_S, SILENCE_S
from deployments.messages import TurnPlan
from deployments.table.accounts import Accounts
from deployments.table.registry import Registry
from deployments.table.room import Room

# A client sends again at once. Its router has missed beats by then, or lives.
_SENT_S, _AGAIN_S = 4.0, 0.1
# LMCache's server announces what is stored within this time.
_ANNOUNCED_S = 0.005


class Unsent(NamedTuple):
    """An answer that has ended, and that its client may not have whole; by its request's digest."""

    digest: bytes
    decoder: str
    router: str


@dataclass(eq=False)
class RunningTurns:
    """Begins and ends turns, also those of a router or a decoder that dies.

    Until `may_be_stored`, LMCache has no conversation's KV, and nothing is looked up there. Of
    turns that are `alone`, the router is lost and the answer goes on; their requests' digests say
    who may rejoin it. Those that are `unsent` have ended, and their routers have not said so.
    """

    settings: Settings
    table: ConversationTable
    registry: Registry
    accounts: Accounts
    room: Room
    routers: dict[TurnKey, str] = field(default_factory=dict)
    decoders: dict[TurnKey, str] = field(default_factory=dict)
    alone: dict[TurnKey, bytes] = field(default_factory=dict)
    unsent: dict[TurnKey, Unsent] = field(default_factory=dict)
    may_be_stored: bool = False
    # By history, turns that wait for its prefill.
    _waiting: dict[str, asyncio.Future[None]] = field(default_factory=dict)

    # --- they begin --------------------------------------------------------------------------

    def plan(
        self,
        turn: TurnKey,
        history: History,
        prefiller_id: str | None,
        router_id: str,
        later: bool = False,
        reason: Reason = "home",
    ) -> TurnPlan:
        """Return where a turn that has just begun goes."""
        assert history.home is not None
        engines = self.registry.engines
        prefiller = engines[prefiller_id].info if prefiller_id in engines else None
        parks = self.settings.prefills_later_turns or self.table.park(history)
        looks_up = prefiller is not None or (not later and self.may_be_stored)
        plan = TurnPlan(
            turn=turn,
            decoder_id=history.home,
            decoder_url=engines[history.home].info.url,
            prefiller_id=prefiller.id if prefiller else None,
            prefiller_url=prefiller.url if prefiller else None,
            later=later,
            looks_up=looks_up,
            root=None if later else history.root,
            points=b"" if later else history.points,
            parks=parks,
            direct=self.settings.policy_class.keeps_later_turns,
            reason=reason,
        )
        self.begins(plan, router_id)
        return plan

    def begins(self, plan: TurnPlan, router_id: str) -> None:
        self.routers[plan.turn], self.decoders[plan.turn] = router_id, plan.decoder_id
        self.may_be_stored |= plan.parks or plan.prefiller_id is not None
        self.accounts.turn_begins(plan)

    async def has_come(self, turn: TurnKey, coming: Coming) -> None:
        """Wait until the beginning of a turn's prompt is in host memory, or will not be soon.

        The turn has begun, and is abandoned if this is cancelled.
        """
        loop, memory = asyncio.get_running_loop(), self.table.memory
        assert memory is not None
        began_s = loop.time()
        until_s = began_s + 1 + 4 * coming.done_in_s
        try:
            while memory.is_coming(coming) and (left_s := until_s - loop.time()) > 0:
                done = self._waiting.setdefault(coming.history_id, loop.create_future())
                await asyncio.wait([done], timeout=left_s)
            await asyncio.sleep(_ANNOUNCED_S)
        except asyncio.CancelledError:
            self.abandon(turn)
            raise
        self.table.has_waited(turn)
        if (record := self.table.record(turn.turn_id)) is not None:
            record.beginning_s = loop.time() - began_s

    def _has_come(self, history_id: str) -> None:
        if (done := self._waiting.pop(history_id, None)) is not None:
            done.set_result(None)

    def is_alone(self, turn: TurnKey, digest: bytes) -> None:
        router_id = self.routers.get(turn)
        if router_id is not None:
            # The turn does not end with its router.
            self.alone[turn], self.routers[turn] = digest, ""
            self.registry.suspect(router_id)

    def rejoined(self, turn: TurnKey, router_id: str) -> None:
        if self.alone.pop(turn, None) is not None:
            self.routers[turn] = router_id
            self.accounts.metrics.rejoined.inc()
            if (record := self.table.record(turn.turn_id)) is not None:
                record.rejoined = True

    async def rejoin(self, digest: bytes, router_id: str) -> TurnPlan | None:
        """Return where the answer to a request that comes again is; None if it has a reader.

        An answer that has ended has one until its router is silent, for which this waits.
        """
        turn = next((one for one, of in self.alone.items() if of == digest), None)
        if turn is not None:
            self.rejoined(turn, router_id)
            decoder = self.registry.engines[self.decoders[turn]].info
            return TurnPlan(turn, decoder.id, decoder.url, later=True, rejoins=True)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _SENT_S
        while loop.time() < until_s:
            turn = next((one for one, of in self.unsent.items() if of.digest == digest), None)
            engine = None if turn is None else self.registry.engines.get(self.unsent[turn].decoder)
            if turn is None or engine is None:
                return None
            if self.registry.router_is_silent(self.unsent[turn].router, loop.time()):
                self.unsent[turn] = self.unsent[turn]._replace(router=router_id)
                self.accounts.metrics.rejoined.inc()
                return TurnPlan(turn, engine.info.id, engine.info.url, later=True, rejoins=True)
            await asyncio.sleep(_AGAIN_S)
        return None

    def pass_over(self, chain: Chain) -> None:
        """End turns that are alone, if their client goes on from the answer before."""
        ends = {mark(end) for end in chain.ends}
        for turn in list(self.alone):
            history = self.table.get(turn.history_id)
            if history and history.root == chain.root and not ends.isdisjoint(history.tails):
                self.abandon(turn)

    def is_unsent(self, turn: TurnKey, digest: bytes, decoder_id: str) -> None:
        """Keep the place of an answer that has ended, until its router says that it was sent."""
        router_id = self.routers.get(turn)
        if digest and router_id and turn not in self.accounts.unlogged:
            self.unsent[turn] = Unsent(digest, decoder_id, router_id)
            asyncio.get_running_loop().call_later(SILENCE_S, self.unsent.pop, turn, None)

    def prefilled(self, plan: TurnPlan, done: TurnStats | None) -> None:
        self.stored(plan.turn, 0 if done is None else done.prefilled_tokens)
        self.accounts.prefilled(plan, done, goes_on=plan.turn in self.routers)

    def stored(self, turn: TurnKey, tokens: int) -> None:
        self.table.prefilled(turn, tokens)
        self._has_come(turn.history_id)

    # --- they end ----------------------------------------------------------------------------

    def advance(
        self, turn: TurnKey, decoder_id: str, stats: TurnStats, tails: tuple[Digest, ...]
    ) -> bool:
        # The table has noted how the turn began; a turn of a predecessor's has no such record.
        known = self.table.record(turn.turn_id)
        if known is not None:
            known.merge(stats)
            stats = known
        self.ends(turn, stats)
        if decoder_id not in self.registry.engines:
            # A new table: the decoder will register, with this turn among its holdings.
            return True
        if self.table.advance(turn, decoder_id, stats, tails, unix_s()):
            self.accounts.advanced(turn, stats, decoder_id)
            if not self.room.admission.queue:
                self.table.child_ended(turn.history_id, unix_s())
        still_has = self.table.holds(turn, decoder_id)
        self.room.relieve(decoder_id)
        self.room.admit(turn.history_id)
        return still_has

    def abandon(
        self, turn: TurnKey, decoder_id: str | None = None, stats: TurnStats | None = None
    ) -> None:
        if turn in self.routers:
            # Decoder and router may both tell of it.
            self.accounts.cut(turn, decoder_id, stats)
        self.ends(turn, stats)
        if stats is not None:
            self.accounts.metrics.handed_off(stats)
        ended = self.table.abandon(turn, decoder_id, stats, unix_s())
        if ended is not None:
            self.room.has_ended(ended, "first_turn_failed")
        self.room.relieve(decoder_id)
        self.room.admit(turn.history_id)

    def ends(self, turn: TurnKey, stats: TurnStats | None) -> None:
        self.routers.pop(turn, None)
        self.decoders.pop(turn, None)
        self.alone.pop(turn, None)
        self._has_come(turn.history_id)
        self.accounts.turn_ends(turn, stats)

    def router_lost(self, router_id: str) -> None:
        """End the turns of a lost router; decoders report those that got to them."""
        for turn, router in list(self.routers.items()):
            if router == router_id:
                self.abandon(turn)

    def engine_lost(self, engine_id: str) -> None:
        """End the turns of a lost engine, which reports them no more."""
        for turn in [turn for turn, on in self.decoders.items() if on == engine_id]:
            history = self.table.get(turn.history_id)
            if history is not None:
                if history.prefiller_id is not None:
                    # It may not have come there yet: its router tells.
                    continue
                self.accounts.cut(turn, engine_id, None)
            self.ends(turn, None)


logger = logging.getLogger("conserve.table")

# How long to wait for decoders to say what they have done. To list or end conversations, or to
# begin a turn beside another: as long as a decoder may begin turns. To move a conversation: as long
# as a decoder may be silent.
LOOK_S, MOVE_S = direct.LEASE_S, SILENCE_S


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

    async def hear(self, decoder_id: str, registration: int, heard: int) -> direct.Notice | None:
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
        if due is None:
            return None
        salt = self.running.accounts.recording.salt(unix_s())
        return due._replace(parks=self._parks_on(decoder_id), salt=salt)

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

    def report(self, decoder_id: str, registration: int, report: direct.Report) -> bool | None:
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

    def _happened(self, event: direct.Happened, decoder_id: str) -> None:
        turn = event.turn
        if isinstance(event, direct.Alone):
            self.running.is_alone(turn, event.digest)
        elif isinstance(event, direct.Stored):
            self.running.stored(turn, event.tokens)
        elif isinstance(event, direct.Digested):
            self.running.accounts.recording.note(turn, unix_s(), blocks=event.blocks)
        elif isinstance(event, direct.Rejoined):
            self.running.rejoined(turn, event.router_id)
        elif isinstance(event, direct.Began):
            if self.table.began(turn, decoder_id, unix_s(), event.parks):
                url = self.registry.engines[decoder_id].info.url
                plan = TurnPlan(turn, decoder_id, url, later=True, parks=event.parks)
                self._begun[decoder_id].add(turn)
                self.running.begins(plan, event.router_id)
        else:
            self._ended(event, decoder_id)

    def _ended(self, event: direct.Ended, decoder_id: str) -> None:
        turn = event.turn
        self._begun[decoder_id].discard(turn)
        if not event.completed or event.stats is None:
            self.running.abandon(turn, decoder_id, event.stats)
            return
        self.running.is_unsent(turn, event.digest, decoder_id)
        if not self.running.advance(turn, decoder_id, event.stats, event.tails):
            # Ended or moved meanwhile: a table rebuilt from holdings must not revive it.
            self.registry.note_forgotten(decoder_id, turn.history_id, turn.incarnation)

    def _parks_on(self, decoder_id: str) -> bool:
        memory = self.table.memory
        return memory is not None and memory.parks_on(decoder_id, unix_s())

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
