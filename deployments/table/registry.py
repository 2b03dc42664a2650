"""Keeps the engines and routers that live, and what engines are still to be told."""

from collections import Counter
from urllib.parse import urlsplit

from conserve.conversations import ConversationTable
from conserve.encoders import Encoder
from conserve.history import History
from conserve.holdings import Parked
from conserve.placement.load import EngineLoad
from conserve.wire import SILENCE_S, Role, StartPhase
from deployments.messages import CountingEngine, EngineInfo, EngineStarting, SchedulerLoad

# An engine that has not come further by then is taken for one that died while it started.
_STARTS_WITHIN_S = 1800.0


class Registry:
    """Engines and routers that were heard of lately. Times are of the monotonic clock.

    Args:
        table: is told of prefillers and decoders that come and go.

    Attributes:
        loads: what engines have told last of their work, by id.
        schedulers: the same of their schedulers, where these know conversations.
        last_beat_s: when any engine or router was heard of.
        parked_before: what a predecessor knew of host memory, until there is an engine with some.
    """

    def __init__(self, table: ConversationTable, now_s: float) -> None:
        self._table = table
        self.engines: dict[str, EngineInfo] = {}
        self.loads: dict[str, EngineLoad] = {}
        self.schedulers: dict[str, SchedulerLoad] = {}
        self.last_beat_s = now_s
        self.parked_before: list[Parked] = []
        self._starting: dict[str, tuple[EngineStarting, float]] = {}
        self._engine_beats_s: dict[str, float] = {}
        self._router_beats_s: dict[str, float] = {}
        self._lost_routers: set[str] = set()
        # Conversations (and incarnations) that a decoder's next beat tells it to forget.
        self._ended: dict[str, list[tuple[str, int]]] = {}

    # --- engines -----------------------------------------------------------------------------

    def start(self, engine: EngineStarting, now_s: float) -> None:
        self._starting[engine.id] = (engine, now_s)

    def starting(self, now_s: float) -> dict[StartPhase, int]:
        """Count the engines that are not ready yet, by what they do."""
        old = [id_ for id_, (_, at_s) in self._starting.items() if now_s - at_s > _STARTS_WITHIN_S]
        for engine_id in old:
            del self._starting[engine_id]
        return dict(Counter(engine.phase for engine, _ in self._starting.values()))

    def add(self, engine: EngineInfo, now_s: float) -> list[tuple[str, int]]:
        """Add an engine that is ready. Returns conversations (and incarnations) to forget."""
        forget: list[tuple[str, int]] = []
        self._starting.pop(engine.id, None)
        if engine.role == "prefiller":
            self._table.add_prefiller(engine.id)
        if engine.hosts:
            sent = {held.id: held.incarnation for held in engine.holds}
            foreign = self._table.add_decoder(engine.id, engine.capacity_tokens, engine.holds)
            forget = [(history_id, sent[history_id]) for history_id in foreign]
            self._ended.setdefault(engine.id, [])
            if engine.registration:
                self._table.notices.add(engine.id, engine.registration)
        if engine.role != "encoder":
            self._table.engine_joined(engine.id, engine.kind, engine.handoffs)
        if engine.leaving:
            self._table.leave(engine.id)
        self.engines[engine.id] = engine
        self._engine_beats_s[engine.id] = now_s
        self._count_host_memory()
        if self._table.memory is not None:
            # Now that there is room for it.
            self._table.memory.take_over([*self.parked_before, *engine.parked])
            if engine.host_tokens:
                self.parked_before = []
        return forget

    def engine_beat(self, engine_id: str, now_s: float) -> EngineInfo | None:
        """Note that an engine was heard of; None if it is unknown, and has to register."""
        self.last_beat_s = now_s
        engine = self.engines.get(engine_id)
        if engine is not None:
            self._engine_beats_s[engine_id] = now_s
        return engine

    def remove(self, engine: EngineInfo) -> list[str]:
        """Remove an engine that is lost or has left; returns ids of conversations bound to it."""
        del self.engines[engine.id]
        self._count_host_memory()
        self._engine_beats_s.pop(engine.id, None)
        self._ended.pop(engine.id, None)
        self.loads.pop(engine.id, None)
        self.schedulers.pop(engine.id, None)
        # A prefiller that hosts is both.
        self._table.remove_prefiller(engine.id)
        return self._table.remove_decoder(engine.id)

    def _count_host_memory(self) -> None:
        """Count host memory once a node: engines that share an address share a server."""
        if self._table.memory is not None:
            engines = [one for one in self.engines.values() if one.role != "encoder"]
            of_node = {urlsplit(one.url).hostname: one.host_tokens for one in engines}
            self._table.memory.set_host_tokens(sum(of_node.values()))

    def silent_engines(self, now_s: float) -> list[str]:
        return _silent(self._engine_beats_s, now_s)

    def living_and_leaving(self, role: Role) -> tuple[int, int]:
        """Count a role's engines, and those of them that are leaving."""
        found = [engine.id for engine in self.engines.values() if engine.role == role]
        return len(found), sum(map(self._table.is_leaving, found))

    def encoders(self) -> list[Encoder]:
        """Return the engines that only encode, and stay."""
        engines = (one for one in self.engines.values() if one.role == "encoder")
        return [Encoder(one.id, one.url) for one in engines if not self._table.is_leaving(one.id)]

    def counters(self) -> list[CountingEngine]:
        """Return the engines to count a prompt: prefillers, or decoders, the likeliest first."""
        prefillers = self._table.accepting_prefillers
        decoders = self._table.accepting_decoders
        ids = [one.id for one in sorted(prefillers, key=lambda one: one.queued_tokens)] or [
            one.id for one in sorted(decoders, key=lambda one: one.conversations)
        ]
        engines = (self.engines[id_] for id_ in ids)
        return [CountingEngine(one.id, one.url, one.max_model_len) for one in engines]

    # --- what decoders are told --------------------------------------------------------------

    def note_ended(self, history: History) -> None:
        """Have a history's decoder told, with its next beat, that the history has ended."""
        if history.home is not None:
            self.note_forgotten(history.home, history.id, history.incarnation)

    def note_forgotten(self, decoder_id: str, history_id: str, incarnation: int) -> None:
        if decoder_id in self._ended:
            self._ended[decoder_id].append((history_id, incarnation))
            self._table.notices.give_up(decoder_id, history_id, incarnation, ended=True)

    def take_ended(self, engine_id: str) -> list[tuple[str, int]]:
        """Return the histories that an engine has to forget; each is returned once."""
        ended = self._ended.get(engine_id, [])
        self._ended[engine_id] = []
        return ended

    # --- routers -----------------------------------------------------------------------------

    @property
    def has_routers(self) -> bool:
        return bool(self._router_beats_s)

    def router_beat(self, router_id: str, now_s: float) -> None:
        self.last_beat_s = self._router_beats_s[router_id] = now_s
        self._lost_routers.discard(router_id)

    def remove_router(self, router_id: str) -> None:
        del self._router_beats_s[router_id]
        self._lost_routers.add(router_id)

    def router_is_lost(self, router_id: str) -> bool:
        """Whether it was lost, and not heard of since: its client is gone."""
        return router_id in self._lost_routers

    def silent_routers(self, now_s: float) -> list[str]:
        return _silent(self._router_beats_s, now_s)


def _silent(beats_s: dict[str, float], now_s: float) -> list[str]:
    return [id for id, beat_s in beats_s.items() if now_s - beat_s > SILENCE_S]
