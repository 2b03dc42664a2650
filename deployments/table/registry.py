"""Keeps the engines and routers that live, and what engines are still to be told."""

from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from conserve.conversations import ConversationTable
from conserve.encoders import Encoder
from conserve.holdings import Parked
from conserve.placement.load import EngineLoad
from conserve.wire import BEAT_S, SILENCE_S, Role, StartPhase
from deployments.messages import CountingEngine, EngineInfo, EngineStarting, SchedulerLoad

# An engine that has not come further by then is taken for one that died while it started.
_STARTS_WITHIN_S = 1800.0
# A router that is suspected to be dead, and silent for this long, is lost.
_MISSED_S, _SUSPECT_S = 2.0, 3 * BEAT_S


@dataclass(eq=False, slots=True)
class Engine:
    """An engine that lives: what it has told of itself, and what it is still to be told.

    Attributes:
        heard_s: when it was heard of.
        load, scheduler: what it told last of its work, and of a scheduler that knows conversations.
        leaving: whether it gets nothing new.
        drained: whether an operator drains it: its replica does not ask whether to stay.
        ended: histories (and incarnations) that its next beat tells it to forget.
        forgotten: conversations that were ended, whose files it is told to remove.
    """

    info: EngineInfo
    heard_s: float
    load: EngineLoad | None = None
    scheduler: SchedulerLoad | None = None
    leaving: bool = False
    drained: bool = False
    ended: list[tuple[str, int]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)


class Registry:
    """Engines and routers that were heard of lately. Times are of the monotonic clock.

    Args:
        table: is told of prefillers and decoders that come and go.

    Attributes:
        last_beat_s: when any engine or router was heard of.
        parked_before: what a predecessor knew of host memory, until there is an engine with some.
        router_beats_s: when each router was heard of.
        began_s: when engines that are not ready yet began to start.
        start_s: how long the latest engine took to start; None: none has, under this table.
        lost_routers: those that were lost, and not heard of since: their clients are gone.
    """

    def __init__(self, table: ConversationTable, now_s: float) -> None:
        self._table = table
        self.engines: dict[str, Engine] = {}
        self.last_beat_s = now_s
        self.parked_before: list[Parked] = []
        self._starting: dict[str, tuple[EngineStarting, float]] = {}
        self.began_s: dict[str, float] = {}
        self.start_s: float | None = None
        self.router_beats_s: dict[str, float] = {}
        self.lost_routers: set[str] = set()
        # Routers that a decoder has lost, and not heard of since.
        self._suspects: set[str] = set()

    # --- engines -----------------------------------------------------------------------------

    def start(self, engine: EngineStarting, now_s: float) -> None:
        self._starting[engine.id] = (engine, now_s)
        self.began_s.setdefault(engine.id, now_s)

    def starting(self, now_s: float) -> dict[StartPhase, int]:
        """Count the engines that are not ready yet, by what they do."""
        old = [id_ for id_, (_, at_s) in self._starting.items() if now_s - at_s > _STARTS_WITHIN_S]
        for engine_id in old:
            del self._starting[engine_id], self.began_s[engine_id]
        return dict(Counter(engine.phase for engine, _ in self._starting.values()))

    def add(self, engine: EngineInfo, now_s: float) -> list[tuple[str, int]]:
        """Add an engine that is ready. Returns conversations (and incarnations) to forget."""
        forget: list[tuple[str, int]] = []
        if self._starting.pop(engine.id, None) is not None:
            self.start_s = now_s - self.began_s.pop(engine.id)
        if engine.role == "prefiller":
            self._table.add_prefiller(engine.id)
        if engine.hosts:
            sent = {held.id: held.incarnation for held in engine.holds}
            foreign = self._table.add_decoder(engine.id, engine.capacity_tokens, engine.holds)
            forget = [(history_id, sent[history_id]) for history_id in foreign]
            if engine.registration:
                self._table.notices.add(engine.id, engine.registration)
        if engine.role != "encoder":
            self._table.engine_joined(engine.id, engine.kind, engine.handoffs)
        known = self.engines.setdefault(engine.id, Engine(engine, now_s))
        known.info, known.heard_s = engine, now_s
        if engine.leaving:
            self.leave(known)
        self._count_host_memory()
        if self._table.memory is not None:
            # Now that there is room for it.
            self._table.memory.take_over([*self.parked_before, *engine.parked])
            if engine.host_tokens:
                self.parked_before = []
        return forget

    def engine_beat(self, engine_id: str, now_s: float) -> Engine | None:
        """Note that an engine was heard of; None if it is unknown, and has to register."""
        self.last_beat_s = now_s
        engine = self.engines.get(engine_id)
        if engine is not None:
            engine.heard_s = now_s
        return engine

    def leave(self, engine: Engine) -> None:
        """Give an engine nothing new; it keeps what it has."""
        engine.leaving = True
        self._table.leave(engine.info.id)

    def remove(self, engine_id: str) -> list[str]:
        """Remove an engine that is lost or has left; returns ids of conversations bound to it."""
        del self.engines[engine_id]
        self._count_host_memory()
        return self._table.remove_engine(engine_id)

    def _count_host_memory(self) -> None:
        """Count host memory once a node: engines that share an address share a server."""
        if self._table.memory is not None:
            self._table.memory.set_host_tokens(sum(self.hosts.values()))

    @property
    def hosts(self) -> dict[str | None, int]:
        """Return tokens of host memory by node, of nodes whose engines compute prompts."""
        engines = [one for one in self.infos if one.role != "encoder"]
        return {urlsplit(one.url).hostname: one.host_tokens for one in engines}

    @property
    def infos(self) -> list[EngineInfo]:
        return [engine.info for engine in self.engines.values()]

    def silent_engines(self, now_s: float) -> list[str]:
        engines = self.engines.items()
        return [id_ for id_, engine in engines if now_s - engine.heard_s > SILENCE_S]

    def living_and_leaving(self, role: Role) -> tuple[int, int]:
        """Count a role's engines, and those of them that are leaving."""
        found = [engine.leaving for engine in self.engines.values() if engine.info.role == role]
        return len(found), sum(found)

    def encoders(self) -> list[Encoder]:
        """Return the engines that only encode, and stay."""
        stay = (engine.info for engine in self.engines.values() if not engine.leaving)
        return [Encoder(one.id, one.url) for one in stay if one.role == "encoder"]

    def counters(self) -> list[CountingEngine]:
        """Return the engines to count a prompt: prefillers, or decoders, the likeliest first."""
        prefillers = self._table.accepting_prefillers
        decoders = self._table.accepting_decoders
        ids = [one.id for one in sorted(prefillers, key=lambda one: one.queued_tokens)] or [
            one.id for one in sorted(decoders, key=lambda one: one.conversations)
        ]
        engines = (self.engines[id_].info for id_ in ids)
        return [CountingEngine(one.id, one.url, one.max_model_len) for one in engines]

    def note_forgotten(self, decoder_id: str, history_id: str, incarnation: int) -> None:
        """Have a decoder told, with its next beat, to forget a history."""
        decoder = self.engines.get(decoder_id)
        if decoder is not None and decoder.info.hosts:
            decoder.ended.append((history_id, incarnation))
            self._table.notices.give_up(decoder_id, history_id, incarnation, ended=True)

    # --- routers -----------------------------------------------------------------------------

    def router_beat(self, router_id: str, now_s: float) -> None:
        self.last_beat_s = self.router_beats_s[router_id] = now_s
        self.lost_routers.discard(router_id)
        self._suspects.discard(router_id)

    def remove_router(self, router_id: str) -> None:
        del self.router_beats_s[router_id]
        self.lost_routers.add(router_id)
        self._suspects.discard(router_id)

    def router_is_silent(self, router_id: str, now_s: float) -> bool:
        """Return whether a router has missed beats. It is not lost for that yet."""
        beat_s = self.router_beats_s.get(router_id)
        return beat_s is None or now_s - beat_s > _MISSED_S

    def suspect(self, router_id: str) -> None:
        """Wait less long for a router whose connections have broken."""
        if router_id in self.router_beats_s:
            self._suspects.add(router_id)

    def silent_routers(self, now_s: float) -> list[str]:
        return [
            one
            for one, beat_s in self.router_beats_s.items()
            if now_s - beat_s > (_SUSPECT_S if one in self._suspects else SILENCE_S)
        ]
