"""How routers, engines and what runs tools call the conversation table."""

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Self, TypeVar

import msgspec
import ray

from conserve.conversations import MEMORY_ENVIRONMENT
from conserve.events import Event, Kind
from conserve.history import History, TurnKey
from conserve.holdings import Parked
from conserve.settings import Settings
from conserve.wire import SILENCE_S
from deployments import answers, messages
from deployments.detached import USUAL, ActorClient, Patience, asks, call, find_or_make, listed
from deployments.table.table import TableService

Claimed = TypeVar("Claimed", messages.TurnPlan | messages.Unplaced, messages.TurnPlan)


logger = logging.getLogger("conserve.table")

_PATIENCE_S = 20.0


class TableName(str):
    """The name of a deployment's table; those of later deployments compare as greater.

    Engines with another model or other arguments need another table: no history can move between
    them and those before.
    """

    @classmethod
    def of(cls, application: str, deployment: str, settings: Settings) -> Self:
        own = [settings.of_role(role).engine for role in ("decoder", "prefiller")]
        said = json.dumps([settings.model, settings.model_id, settings.engine, *own], default=str)
        digest = hashlib.sha256(said.encode()).hexdigest()[:8]
        return cls(f"conserve:{application}:table:{digest}:{deployment}")

    def alive(self) -> list[str]:
        """Return the names of the tables that live, the oldest first; this one's may be there."""
        return sorted(listed(self[: self.rindex(":") + 1]))

    def newest(self) -> str:
        return max([self, *self.alive()])


class Legacy(msgspec.Struct):
    """All that the next table cannot learn from engines. Later versions may add to it.

    Attributes:
        histories: with where they are bound, and the turns that run.
        running: turns under way, with their routers and decoders.
        engines: ids of those that will register.
    """

    histories: list[History] = []
    running: list[tuple[TurnKey, str, str]] = []
    parked: list[Parked] = []
    # Another version may have other kinds.
    events: Sequence[tuple[int, float, Any, str, dict[str, Any]]] = ()
    engines: list[str] = []


class TableActor(TableService):
    """A table that takes over from those of earlier deployments as it starts, and ends them.

    To their routers and engines that is a table which dies: they find this one by its name, and
    engines register here with what they hold. Turns that run go on meanwhile.

    Ray runs the constructor before any call, and again if the actor dies: then no earlier one is
    left.
    """

    def __init__(self, name: TableName, settings: Settings) -> None:
        super().__init__(settings)
        for earlier in reversed([one for one in name.alive() if one < name]):
            with contextlib.suppress(ValueError):  # It has just ended.
                actor = ray.get_actor(earlier, namespace="serve")
                try:
                    packed = ray.get(call(actor, TableActor.hand_over), timeout=_PATIENCE_S)
                    self.take_over(msgspec.msgpack.decode(packed, type=Legacy))
                except Exception as error:
                    # What engines hold is enough to go on.
                    logger.warning("nothing is taken over from %s: %s", earlier, error)
                # Its callers come here then.
                ray.kill(actor)

    async def hand_over(self) -> bytes:
        """Return a packed `Legacy`, and begin nothing more."""
        self._recovery.handed_over = True
        table, running = self._table, self._running
        histories = table.live()
        memory = table.memory
        parked = () if memory is None else memory.all_parked(histories)
        turns = [(turn, router, running.decoders[turn]) for turn, router in running.routers.items()]
        engines = [one.id for one in self._registry.engines.values() if one.role != "encoder"]
        legacy = Legacy(
            [msgspec.structs.replace(one, base=None) for one in histories],
            turns, list(parked), self._events.after(0), engines,
        )  # fmt: skip
        logger.info("%d histories go to the next deployment's table", len(histories))
        return msgspec.msgpack.encode(legacy)

    def take_over(self, legacy: Legacy) -> None:
        self._table.take_over(legacy.histories)
        self._registry.parked_before += legacy.parked
        self._events.take_over(Event(*one) for one in legacy.events)
        self._recovery.expects(legacy.engines)
        self._running.may_be_stored = True
        for turn, router_id, decoder_id in legacy.running:
            self._running.routers[turn], self._running.decoders[turn] = router_id, decoder_id
        logger.info("%d histories come from the last deployment's table", len(legacy.histories))


class TableUnavailable(Exception):
    """The conversation table did not answer in time; Ray is starting it again."""


# For callers that ask again soon, and for those that look at the application's health.
_NONE = Patience(0.0, 10.0)
_SOME = Patience(5.0, 10.0)
# For a decoder's reports: the next one tells of this one's turns, too.
_REPORTING = Patience(1.0, SILENCE_S)


class TableClient(ActorClient):
    """A caller's end of the table. Its methods are those of `TableService`, which describes them.

    All that return something raise `TableUnavailable` if the table stays down or does not answer,
    and `ApiError` if it refuses. Those that return nothing do not wait for an answer. A turn whose
    caller of `begin` or `place` is cancelled is given back.
    """

    def __init__(self, application: str, deployment: str, settings: Settings) -> None:
        self._name = TableName.of(application, deployment, settings)
        self._settings = settings

    # --- of routers --------------------------------------------------------------------------

    async def begin(self, asked: messages.BeginTurn) -> messages.TurnPlan | messages.Unplaced:
        return await self._claimed(self._ask(USUAL, TableService.begin, asked))

    async def place(self, asked: messages.PlaceTurn) -> messages.TurnPlan:
        return await self._claimed(self._ask(USUAL, TableService.place, asked))

    def forgo(self, placed: messages.Unplaced) -> None:
        self._tell(TableService.forgo, placed.history_id, placed.claim)

    def prefilled(self, plan: messages.TurnPlan, done: messages.Prefilled | None) -> None:
        self._tell(TableService.prefilled, plan, done)

    def abandon(self, plan: messages.TurnPlan) -> None:
        """End a turn that got to no decoder."""
        self._tell(TableService.abandon, plan.turn, None, None)

    def observe(self, timing: messages.TurnTiming) -> None:
        self._tell(TableService.observe, timing)

    def finish(self, history_id: str) -> None:
        """End the conversation of a turn that was its last one."""
        self._tell(TableService.release, history_id, "final")

    async def engines(self, *, exact: bool = False, soon: bool = False) -> list[answers.Engine]:
        """Return the engines alive.

        Args:
            soon: whether a table that does not answer within ten seconds is unavailable.
        """
        return await self._ask(_SOME if soon else USUAL, TableService.engines, exact)

    async def events(self, query: messages.EventQuery) -> messages.EventPage:
        patience = Patience(0.0, 2 * max(10.0, query.patience_s))
        return await self._ask(patience, TableService.events, query)

    release = asks(TableService.release)
    report_tool = asks(TableService.report_tool)
    router_beat = asks(TableService.router_beat)
    engine_lost = asks(TableService.engine_lost)
    health = asks(TableService.health, _SOME)
    drain = asks(TableService.drain)
    conversation = asks(TableService.conversation)
    conversations = asks(TableService.conversations)
    metrics = asks(TableService.metrics)

    # --- of engines --------------------------------------------------------------------------

    def engine_starting(self, engine: messages.EngineStarting) -> None:
        self._tell(TableService.engine_starting, engine)

    register = asks(TableService.register)
    beat = asks(TableService.beat)
    leave = asks(TableService.leave)
    left = asks(TableService.left)
    hear = asks(TableService.hear, _REPORTING)
    report = asks(TableService.report, _REPORTING)

    # --- of what runs conversations' tools ---------------------------------------------------

    lifecycle = asks(TableService.lifecycle, _NONE)

    def note(self, kind: Kind, conversation_id: str, details: dict[str, Any]) -> None:
        self._tell(TableService.note, kind, conversation_id, details)

    # --- how ---------------------------------------------------------------------------------

    async def _claimed(self, asked: Coroutine[Any, Any, Claimed]) -> Claimed:
        asking = asyncio.ensure_future(asked)
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(self._give_back)
            raise

    def _give_back(self, asking: "asyncio.Future[Any]") -> None:
        if asking.cancelled() or asking.exception() is not None:
            return
        answer = asking.result()
        if isinstance(answer, messages.TurnPlan):
            self.abandon(answer)
        else:
            self.forgo(answer)

    def _unavailable(self, why: str) -> Exception:
        return TableUnavailable(f"the conversation table {why}")

    def _connect(self) -> Any:
        """Find the newest deployment's table: it has taken over from those before."""
        while self._actor is None:
            newest = self._name.newest()
            if newest <= self._name:
                self._actor = find_or_make(
                    TableActor, self._name, self._name, self._settings,
                    environment=MEMORY_ENVIRONMENT,
                )  # fmt: skip
            else:
                with contextlib.suppress(ValueError):  # It has just ended.
                    self._actor = ray.get_actor(newest, namespace="serve")
        return self._actor
