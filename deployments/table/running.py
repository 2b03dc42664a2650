"""Keeps the turns under way, with the router and the decoder of each."""

from dataclasses import dataclass, field

from conserve.clock import unix_s
from conserve.conversations import ConversationTable
from conserve.history import History
from conserve.recognition import Digest
from conserve.settings import Settings
from conserve.turn import Reason, TurnKey, TurnStats
from deployments.messages import TurnPlan
from deployments.table.accounts import Accounts
from deployments.table.registry import Registry
from deployments.table.room import Room


@dataclass(eq=False)
class RunningTurns:
    """Begins and ends turns, also those of a router or a decoder that dies.

    Until `may_be_stored`, LMCache has no conversation's KV, and nothing is looked up there.
    """

    settings: Settings
    table: ConversationTable
    registry: Registry
    accounts: Accounts
    room: Room
    routers: dict[TurnKey, str] = field(default_factory=dict)
    decoders: dict[TurnKey, str] = field(default_factory=dict)
    may_be_stored: bool = False

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
        prefiller = engines.get(prefiller_id) if prefiller_id else None
        parks = self.settings.prefills_later_turns or self.table.park(history)
        looks_up = prefiller is not None or (not later and self.may_be_stored)
        plan = TurnPlan(
            turn=turn,
            decoder_id=history.home,
            decoder_url=engines[history.home].url,
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

    def prefilled(self, plan: TurnPlan, done: TurnStats | None) -> None:
        self.table.prefilled(plan.turn, 0 if done is None else done.prefilled_tokens)
        self.accounts.prefilled(plan, done, goes_on=plan.turn in self.routers)

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
        still_has = self.table.holds(turn, decoder_id)
        self.room.relieve(decoder_id)
        self.room.admit()
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
        self.room.admit()

    def ends(self, turn: TurnKey, stats: TurnStats | None) -> None:
        self.routers.pop(turn, None)
        self.decoders.pop(turn, None)
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
